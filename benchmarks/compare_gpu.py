"""The whole series on a GPU: what each capability is worth on the same requests, beside Hugging Face.

    python -m benchmarks.compare_gpu [--shape gpt2-xl | qwen3-0.6b] [--repeats 1]    # two minutes on an H200

64 requests that begin with the same 128 random tokens and go on with 16 to 128 of their own; outputs of 16 to
256 tokens, greedy, end of sequence ignored; random bf16 weights. Sides come one after the other in one
process: built, warmed up, timed, and taken down. Who is slow gets some of the requests: speed is per token.
Drafts of noise would say nothing: nobody speculates. A side that fails is said, and left out.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch

from benchmarks.part08_against_others import hf_padded
from benchmarks.record import RESULTS, record, show
from benchmarks.shapes import GPT2_XL, add_tokenizer, dummy_folder
from benchmarks.workloads import Job
from engine import LLM, SamplingParams
from engine.models.known_shapes import SHAPES

SEATS, REQUESTS, SHARED = 64, 64, 128
KV_BYTES = 16 * 2**30
Run = Callable[[list[Job]], object]
# label: which part brings it, what `LLM` is told, and every how many requests are run
OURS = {
    "Part 3: KV cache, one by one": (
        {"kv_cache": "slots", "attention": "sdpa", "max_num_seqs": 1, "async_scheduling": False},
        32,
    ),
    "Part 8: + continuous batching": (
        {"kv_cache": "slots", "attention": "sdpa", "async_scheduling": False}, 1
    ),
    "Part 12: + pages": (
        {"attention": "sdpa", "async_scheduling": False, "enable_prefix_caching": False}, 1
    ),
    "Part 12: + prefix cache": ({"attention": "sdpa", "async_scheduling": False}, 1),
    "Part 13: + kernels that read pages": ({"enforce_eager": True, "async_scheduling": False}, 1),
    "Part 13: + graphs of tuned kernels": ({"async_scheduling": False}, 1),
    "Part 13: + one step ahead": ({}, 1),
    "Part 17: int8 instead": ({"quantization": "int8"}, 1),
}  # fmt: skip


def work(vocab_size: int, seed: int) -> list[Job]:
    """The same lengths each time, and other tokens: nobody finds another run's prefix."""
    lengths, tokens = Random(0), Random(seed)

    def some(count: int) -> list[int]:
        return [tokens.randrange(vocab_size) for _ in range(count)]

    shared = some(SHARED)
    return [(shared + some(lengths.randint(16, 128)), lengths.randint(16, 256)) for _ in range(REQUESTS)]


def our_side(folder: Path, options: dict) -> Run:
    llm = LLM(
        folder, load_format="dummy", device="cuda", kv_cache_memory_bytes=KV_BYTES, max_model_len=1024,
        **{"max_num_seqs": SEATS} | options,
    )  # fmt: skip

    def run(jobs: list[Job]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in jobs]
        llm.generate([{"prompt_token_ids": prompt} for prompt, _ in jobs], params, use_tqdm=False)

    return run


def hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    with torch.device("cuda"):
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def generate_alone(folder: Path) -> Run:
    model = hugging_face(folder)

    def run(jobs: list[Job]) -> None:
        for prompt, n in jobs:
            ids = torch.tensor([prompt], device="cuda")
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n,
                do_sample=False, pad_token_id=0,
            ).tolist()  # fmt: skip

    return run


def generate_padded(folder: Path) -> Run:
    model = hugging_face(folder)

    def run(jobs: list[Job]) -> None:
        with torch.device("cuda"):
            hf_padded(model, jobs)
        torch.cuda.synchronize()

    return run


def generate_batch(folder: Path) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = hugging_face(folder)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.3)
    )
    manager.start()

    def run(jobs: list[Job]) -> None:
        for prompt, n in jobs:
            manager.add_request(prompt, max_new_tokens=n)
        for _ in jobs:
            result = manager.get_result(timeout=20)
            assert result is not None, "generate_batch did not answer"
            assert result.error is None, result.error

    # `measured` calls it at the end.
    run.stop = partial(manager.stop, block=True)  # type: ignore[attr-defined]  # functions have no such name
    return run


def measured(make: Callable[[], Run], every: int, vocab_size: int, repeats: int) -> dict:
    """Tokens per second of one side, alone on the GPU."""
    run, found = make(), []
    try:
        for repeat in range(repeats + 1):
            jobs = work(vocab_size, repeat)[::every]
            if not repeat:  # a warm-up
                jobs = [(prompt, min(n, 16)) for prompt, n in jobs]
            start = time.perf_counter()
            run(jobs)
            found.append(sum(n for _, n in jobs) / (time.perf_counter() - start))
    finally:
        getattr(run, "stop", lambda: None)()
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return {"tokens_per_second": statistics.median(found[1:]), "all": found[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="gpt2-xl", choices=("gpt2-xl", "qwen3-0.6b"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if options.shape == "gpt2-xl":
        dummy_folder(folder, GPT2_XL)
    else:
        raw = json.loads((SHAPES / options.shape / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw))
        add_tokenizer(folder, raw["vocab_size"])
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sides: dict[str, tuple[str, Callable[[], Run], int]] = {
        "generate, one by one": ("Hugging Face", partial(generate_alone, folder), 32),
        "generate, padded batches of 8": ("Hugging Face", partial(generate_padded, folder), 4),
        "generate_batch": ("Hugging Face", partial(generate_batch, folder), 1),
    }
    for label, (settings, every) in OURS.items():
        sides[label] = ("this engine", partial(our_side, folder, settings), every)
    rows, figures, base = [], {}, None
    for label, (whose, make, every) in sides.items():
        try:
            figures[label] = measured(make, every, vocab_size, options.repeats)
        except Exception as error:
            print(f"{label} failed: {error!r}", flush=True)
            continue
        speed = figures[label]["tokens_per_second"]
        base = base or speed
        rows.append([whose, label, speed, speed / base])
        print(*rows[-1], flush=True)
    tables = {"race": {"columns": ["whose", "what", "tokens/s", "× generate, one by one"], "rows": rows}}
    path = record(
        f"compare_{options.shape.replace('-', '_').replace('.', '_')}",
        "What is each capability worth on the same requests, beside Hugging Face, on a GPU?",
        {"model": f"{options.shape}'s shape, random bf16 weights", "requests": REQUESTS, "seats": SEATS,
         "shared_prompt_tokens": SHARED, "own_prompt_tokens": "16 to 128", "output_tokens": "16 to 256",
         "repeats": options.repeats},
        figures,
        tables,
        options.out,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
