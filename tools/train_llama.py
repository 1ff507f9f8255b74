"""Train `storyteller-llama`: storyteller's twin in Llama's shape, with the same tokenizer.

Half as many heads of keys and values as of queries, turned pairs in place of learned positions, RMSNorm, a
SwiGLU. It learns from the embedded storyteller alone: from its distribution, and from stories that it tells
on new requests. Texts, batches, the loop and the files are tools/train_storyteller.py's: read that first.

    python -m tools.train_llama --train TRAIN.txt --val VAL.txt --work DIR --out engine/zoo --seconds 170

Takes about three minutes of one H100. `--seconds` bounds the whole on a GPU: the number of training steps is
what fits into the rest, by the pace of a few, but no more than the stage says.
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.storyteller_texts import ASSISTANT, USER, chat, dress, good, new_requests, read_stories
from tools.train_storyteller import Stage, batches, export, fit, tell

ZOO = Path(__file__).resolve().parents[1] / "engine/zoo"
NAME = "storyteller-llama"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
STAGE = Stage(
    NAME, dropout=0.0, decay=1.0, rate=3e-3, steps=3600, guides=("storyteller",), soft=0.7,
    told=("storyteller",), share=1.0, tells=8192, temperature=0.9, strength=3.0,
)  # fmt: skip
END_SECONDS = 12  # for the files and two stories
PACE_STEPS = 20  # steps of a trial whose pace says how many fit


def stories_told(teacher: torch.nn.Module, tokenizer: Tokenizer, stage: Stage) -> list[str]:
    """The good stories among `stage.tells` that the teacher tells on new requests, as chat turns."""
    requests = new_requests(stage.tells, seed=100)
    wanted = [[word for want in wants for word in want if word] for _, wants in requests]
    prompts = [f"{USER}{text}{ASSISTANT}" for text, _ in requests]
    answers = tell(teacher, tokenizer, prompts, stage.temperature, 400, stage.seed, wanted, stage.strength)
    pairs = zip(requests, answers, strict=True)
    return [chat(text, answer[0]) for (text, wants), answer in pairs if good(*answer, wants)]


def steps_that_fit(
    model: torch.nn.Module, teacher: torch.nn.Module, source: Iterator, stage: Stage, end: float
) -> int:
    """How many steps of `fit` end before `end`, a `time.time()`, by the pace of a few that change nothing."""
    device = next(model.parameters()).device
    trial, guide = torch.compile(model), torch.compile(teacher)
    for step, ids in enumerate(islice(source, PACE_STEPS + 5)):
        if step == 5:  # the first ones compile
            torch.cuda.synchronize()
            began = time.perf_counter()
        ids = ids.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = trial(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            with torch.no_grad():
                target = guide(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        F.cross_entropy(logits, target.softmax(-1)).backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    pace = (time.perf_counter() - began) / PACE_STEPS
    return min(stage.steps, int((end - time.time()) / (1.15 * pace)))  # a real step has an optimizer, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--out", type=Path, help="folder that gets a copy of it, too")
    parser.add_argument("--seconds", type=float, help="the most seconds that all takes, on a GPU")
    parser.add_argument("--passes", type=int, default=16, help="dressings of the corpus to draw batches from")
    parser.add_argument("--steps", type=int, default=STAGE.steps)
    parser.add_argument("--tells", type=int, default=STAGE.tells)
    a = parser.parse_args()
    stage = replace(STAGE, steps=a.steps, tells=a.tells)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    began = time.time()
    tokenizer_file = str(ZOO / "storyteller/tokenizer.json")
    stories, tokenizer = read_stories(a.train), Tokenizer.from_file(tokenizer_file)
    teacher = AutoModelForCausalLM.from_pretrained(ZOO / "storyteller", dtype=torch.float32).to(device).eval()

    told = stories_told(teacher, tokenizer, stage)
    print(f"{time.time() - began:.0f} s: {len(told)} stories of {stage.tells} kept", flush=True)
    rng = Random(stage.seed)
    shares = [rng.sample(told, min(len(told), int(stage.share * len(stories)))) for _ in range(a.passes)]
    with ProcessPoolExecutor() as pool:
        jobs = [(stories, share, tokenizer_file, i) for i, share in enumerate(shares)]
        passes = list(pool.map(dress, *zip(*jobs, strict=True)))
    print(f"{time.time() - began:.0f} s: {a.passes} passes dressed", flush=True)

    torch.manual_seed(stage.seed)
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=0, **SHAPE)
    model = LlamaForCausalLM(config).to(device)
    source = batches(passes, stage.rows, 1024, stage.seed)
    if a.seconds and device.type == "cuda":
        end = began + a.seconds - END_SECONDS
        stage = replace(stage, steps=steps_that_fit(model, teacher, source, stage, end))
        print(f"{time.time() - began:.0f} s: {stage.steps} steps fit", flush=True)
    dev = a.val.read_text()[200_000:500_000]
    record = fit(model, source, [teacher], stage, (tokenizer.encode(dev).ids, len(dev)))
    record |= asdict(stage) | SHAPE | {"parameters": model.num_parameters(), "torch": torch.__version__}
    record["machine"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record["stories_told"] = len(told)
    for folder in filter(None, (a.work, a.out and a.out / NAME)):
        export(model, tokenizer, folder)
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.time() - began:.0f} s in all", flush=True)
    requests = ["Tell me a story about a dog and a red ball", "Tell me a story about an owl."]
    prompts = [f"{USER}{text}{ASSISTANT}" for text in requests]
    print(*chain.from_iterable(tell(model, tokenizer, prompts, 0.7, 300, 0)), sep="\n")


if __name__ == "__main__":
    main()
