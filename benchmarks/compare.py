"""The whole series in one chart: what each capability is worth on the same requests, beside Hugging Face.

    python -m benchmarks.compare [--shape storyteller | gpt2] [--rounds 3]

24 requests that begin with the same story of about 80 tokens and go on as held-out stories do, outputs of 16
to 96 tokens, greedy, end of sequence ignored, on the embedded storyteller, one thread. All sides take turns
in one process; each is the engine as it stood after a part, or Hugging Face. Sides that compute in fp32 and
say what they wrote must agree. Without a cache only every sixth request is run: speed is per token.

`--shape gpt2` is GPT-2 124M with random weights: 8 requests, outputs of 8 to 32 tokens. Drafts of noise would
say nothing, so nobody speculates; and where two tokens are nearly as likely, rounding may choose, so how many
requests agree is written down, and not demanded.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch

from benchmarks.part08_against_others import gpt2_shape, hf_continuous, hf_padded
from benchmarks.part16_engines import PROMPTS
from benchmarks.record import RESULTS, record, show
from benchmarks.workloads import Job, interleaved, run_engine
from engine import LLM, SamplingParams
from engine.cache.single import CachedForward
from engine.decoding.greedy import FullForward, generate
from engine.layers.packed_linear import pack_linears
from engine.models.checkpoint import resolve
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.static import StaticScheduler
from engine.text.tokenizer import Tokenizer

TALE = (
    "Once upon a time, there was a little girl named Lily. She lived in a small house near a big forest with "
    "her mom, her dad and her brown dog Max. Every morning, Lily and Max went out to play in the sun. One "
    "day, they found a map under a big tree. The map showed the way to a secret garden. "
)
DRAFT = {"model": "storyteller-draft", "num_speculative_tokens": 4}


@dataclass(frozen=True)
class Scale:
    """How much of what."""

    requests: int
    every: int  # of which one is run without a cache
    seats: int
    outputs: tuple[int, int]  # tokens, shortest and longest
    trained: bool


SCALES = {
    "storyteller": Scale(24, 6, 16, (16, 96), trained=True),
    "gpt2": Scale(8, 8, 4, (8, 32), trained=False),
}
Side = tuple[str, str, list[Job], Callable[[list[Job]], list[list[int]]]]  # label, whose, its work, how


def work(tokenizer: Tokenizer, scale: Scale) -> list[Job]:
    random = Random(0)
    prompts = [tokenizer.encode(TALE + PROMPTS[i % len(PROMPTS)])[: 80 + i] for i in range(scale.requests)]
    return [(prompt, random.randint(*scale.outputs)) for prompt in prompts]


def one_by_one(
    forward: Callable, model: torch.nn.Module, tokenizer: Tokenizer, jobs: list[Job]
) -> list[list[int]]:
    """Parts 2 and 3: a request after the other."""
    return [
        list(generate(forward(model), tokenizer, model.config, prompt, params(tokens)).outputs[0].token_ids)
        for prompt, tokens in jobs
    ]


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def whole(llm: LLM, jobs: list[Job]) -> list[list[int]]:
    """The finished engine."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in jobs]
    outputs = llm.generate(prompts, [params(tokens) for _, tokens in jobs], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def sides(model: str | Path, scale: Scale, jobs: list[Job], tokenizer: Tokenizer) -> list[Side]:
    from transformers import GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs = GPT2LMHeadModel.from_pretrained(resolve(model), dtype=torch.float32).eval()
    plain = load_model(model)
    packed = load_model(model, transform=pack_linears)
    crowd = load_model(model, transform=partial(pack_linears, rows=scale.seats))
    finished = partial(LLM, model, max_num_seqs=scale.seats, max_model_len=256)
    continuous = partial(ContinuousScheduler, max_num_seqs=scale.seats, max_num_batched_tokens=512)

    def hugging_face_alone(jobs: list[Job]) -> list[list[int]]:
        return [
            theirs.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt, tokens in jobs
        ]  # fmt: skip

    def silently(run: Callable) -> Callable[[list[Job]], list]:
        return lambda jobs: run(jobs) and []

    def batched(make: Callable) -> Callable[[list[Job]], list]:
        return lambda jobs: run_engine(crowd, tokenizer, jobs, scale.seats, make) and []

    hf, ours, few, drafting = "Hugging Face", "this engine", jobs[:: scale.every], []
    if scale.trained:
        drafts = finished(speculative_config=DRAFT)
        drafting = [("Part 16: + speculation", ours, jobs, partial(whole, drafts))]
    return [
        ("generate, one by one", hf, jobs, hugging_face_alone),
        ("generate, padded batches of 8", hf, jobs, silently(partial(hf_padded, theirs))),
        ("generate_batch", hf, jobs, silently(partial(hf_continuous, theirs))),
        ("Part 2: greedy loop", ours, few, partial(one_by_one, FullForward, plain, tokenizer)),
        ("Part 3: + KV cache", ours, jobs, partial(one_by_one, CachedForward, plain, tokenizer)),
        ("Part 3: + packed weights", ours, jobs, partial(one_by_one, CachedForward, packed, tokenizer)),
        ("Part 7: + batches", ours, jobs, batched(partial(StaticScheduler, max_num_seqs=scale.seats))),
        ("Part 8: + continuous batching", ours, jobs, batched(continuous)),
        ("Part 12: + pages", ours, jobs, partial(whole, finished(enable_prefix_caching=False))),
        ("Part 12: + prefix cache", ours, jobs, partial(whole, finished())),
        *drafting,
        ("Part 17: int8 instead", ours, jobs, partial(whole, finished(quantization="int8_dynamic"))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SCALES, default="storyteller")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = "storyteller" if options.shape == "storyteller" else gpt2_shape(Path(folder))
        compare(options, model, SCALES[options.shape])


def compare(options: argparse.Namespace, model: str | Path, scale: Scale) -> None:
    tokenizer = Tokenizer.from_pretrained(model)
    jobs = work(tokenizer, scale)
    said: dict[str, list[list[int]]] = {}

    def timed(label: str, own: list[Job], run: Callable[[list[Job]], list]) -> float:
        start = time.perf_counter()
        said[label] = run(own)
        return (time.perf_counter() - start) / sum(tokens for _, tokens in own)

    with torch.no_grad():  # not inference_mode: HF updates its buffers from another thread
        race = sides(model, scale, jobs, tokenizer)
        for label, _, own, run in race:  # a warm-up; adaptive lengths find out what a step costs
            first = own[:2] if label.startswith("Part 2") else own
            timed(label, first if scale.trained else [(prompt, 2) for prompt, _ in own[:2]], run)
        runs = {label: partial(timed, label, own, run) for label, _, own, run in race}
        seconds = interleaved(runs, options.rounds)
    agree = agreeing(said, scale)
    base = seconds["generate, one by one"]
    rows = [[whose, label, 1 / seconds[label], base / seconds[label]] for label, whose, _, _ in race]
    tables = {"race": {"columns": ["whose", "what", "tokens/s", "× generate, one by one"], "rows": rows}}
    shortest, longest = scale.outputs
    workload = {
        "model": options.shape, "requests": scale.requests, "seats": scale.seats, "torch_threads": 1,
        "prompt_tokens": f"80 to {79 + scale.requests}", "output_tokens": f"{shortest} to {longest}",
        "rounds": options.rounds,
    }  # fmt: skip
    path = record(
        f"compare_{options.shape}",
        "What is each capability worth on the same requests, beside Hugging Face, on a CPU?",
        workload,
        {"tokens_per_second": {label: 1 / value for label, value in seconds.items()}, "agree": agree},
        tables,
        folder=options.out,
    )
    show(path, tables)


def agreeing(said: dict[str, list[list[int]]], scale: Scale) -> dict[str, int]:
    """How many requests of each fp32 side that says what it wrote have the tokens of Part 3. A trained
    model's must all have them.
    """
    expected, found = said["Part 3: + KV cache"], {}
    for label, ids in said.items():
        if not ids or "int8" in label:
            continue
        wanted = expected if len(ids) == scale.requests else expected[:: scale.every]
        found[label] = sum(a == b for a, b in zip(ids, wanted, strict=True))
        assert found[label] == len(ids) or not scale.trained, label
    return found


if __name__ == "__main__":
    main()
