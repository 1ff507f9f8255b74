"""How does the engine compare with Hugging Face and CTranslate2 on a batch of unlike requests, on a CPU?

    python -m benchmarks.part08_against_others [--model storyteller | fp32-twin | gpt2-shape] [--repeats 5]

32 requests, prompts of 8 to 128 tokens, outputs of 16 to 128, greedy, end of sequence ignored, fp32. Every
side at its best setting of those tried: threads 1 and 2 for all, slots for ours, workers and batch size for
CTranslate2, which runs a batch to its longest output: only the tokens asked for are counted. Each measurement
has a process of its own, since threads that one side leaves behind cost the next; the sides take turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import ROOT, quartiles, record, show, spread
from benchmarks.shapes import add_tokenizer
from benchmarks.workloads import Job, fp32_twin, jobs, rounds, run_engine
from engine.layers.packed_linear import pack_linears
from engine.models.checkpoint import ZOO
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

PADDED = 8
REQUESTS = 32


def gpt2_shape(folder: Path) -> Path:
    """GPT-2 124M's true shape with random weights, saved by Hugging Face for all sides."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config()
    GPT2LMHeadModel(config).save_pretrained(folder)
    add_tokenizer(folder, config.vocab_size)
    return folder


def hf_padded(model, work: list[Job]) -> None:
    """`generate` in left-padded batches of 8 in order of arrival, each run to its longest output."""
    for start in range(0, len(work), PADDED):
        part = work[start : start + PADDED]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        longest = max(tokens for _, tokens in part)
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )


def hf_continuous(model, work: list[Job]) -> float:
    """Hugging Face's continuous batching (`generate_batch`), with each request's own length: seconds.

    Its cache is sized for the workload: left alone it takes most of the memory. Starting its thread and
    its cache is not timed, as ours is not; the thread never sleeps, so it is stopped before others run.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    room = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512, allow_block_sharing=False)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=room)
    manager.start()
    manager.add_request(work[0][0], max_new_tokens=2)  # it is up once this is answered
    assert manager.get_result(timeout=600).error is None
    start = time.perf_counter()
    for prompt, tokens in work:
        manager.add_request(prompt, max_new_tokens=tokens)
    for _ in work:
        result = manager.get_result(timeout=600)
        assert result.error is None, result.error
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    return seconds


def ctranslate2_side(
    folder: Path, workers: int, threads: int, size: int, compute_type: str = "float32"
) -> Callable[[list[Job]], None]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    out = tempfile.mkdtemp()
    TransformersConverter(str(folder)).convert(out, force=True)
    generator = ctranslate2.Generator(
        out, compute_type=compute_type, inter_threads=workers, intra_threads=threads
    )
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {id: name for name, id in vocabulary.items()}

    def run(work: list[Job]) -> None:
        futures = []
        for start in range(0, len(work), size):
            part = sorted(work, key=lambda job: job[1])[start : start + size]
            prompts = [[names[id] for id in prompt] for prompt, _ in part]
            longest = max(length for _, length in part)
            futures += generator.generate_batch(
                prompts, max_length=longest, min_length=longest, sampling_topk=1, asynchronous=True,
                include_prompt_in_result=False, max_batch_size=size,
            )  # fmt: skip
        for future in futures:
            future.result()

    return run


def timed(run: Callable, *args) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


Run = Callable[[list[Job]], float]  # does the work, returns seconds


def ours(folder: Path, slots: int) -> Run:
    model = load_model(folder, transform=partial(pack_linears, rows=slots))
    tokenizer = Tokenizer.from_pretrained(folder)
    make = partial(ContinuousScheduler, max_num_seqs=slots, max_num_batched_tokens=512)
    return lambda work: run_engine(model, tokenizer, work, slots, make)[0]


def hugging_face(folder: Path, paged: bool) -> Run:
    from transformers import GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    return partial(hf_continuous, model) if paged else partial(timed, hf_padded, model)


def ctranslate2(folder: Path, **setting: int) -> Run:
    return partial(timed, ctranslate2_side(folder, **setting))


OURS, PADDED_HF, PAGED_HF, CT2 = "this engine", "HF generate, padded", "HF generate_batch", "CTranslate2"
SIDES: dict[str, tuple[int, Callable[[Path], Run]]] = {  # torch threads, and how to set it up
    **{
        f"{OURS}, {slots} at once, {threads} threads": (threads, partial(ours, slots=slots))
        for threads in (1, 2)
        for slots in (16, 32)
    },
    **{
        f"{name}, {threads} threads": (threads, partial(hugging_face, paged=paged))
        for threads in (1, 2)
        for name, paged in ((f"{PADDED_HF} batches of {PADDED}", False), (PAGED_HF, True))
    },
    **{
        f"{CT2} float32, {workers} workers of {threads} threads, batches of {size}": (
            1,
            partial(ctranslate2, workers=workers, threads=threads, size=size),
        )
        for workers, threads, size in ((1, 2, 8), (2, 1, 1), (2, 1, 8), (2, 1, 16))
    },
}


def measure(side: str, folder: Path) -> float:
    """Seconds of one side, after a warm-up; to be called in a fresh process."""
    threads, set_up = SIDES[side]
    torch.set_num_threads(threads)
    run, work = set_up(folder), jobs(REQUESTS, 4096)
    with torch.no_grad():  # not inference_mode: HF updates its buffers from another thread
        run([(prompt, 8) for prompt, _ in work[:PADDED]])
        return run(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="storyteller", choices=["storyteller", "fp32-twin", "gpt2-shape"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help="measure this one alone, in this process")
    parser.add_argument("--folder", type=Path, help="with --side: the model")
    options = parser.parse_args()
    if options.side:
        print(measure(options.side, options.folder))
        return
    make = {"storyteller": lambda _: ZOO / "storyteller", "fp32-twin": fp32_twin, "gpt2-shape": gpt2_shape}
    folder = make[options.model](Path(tempfile.mkdtemp()))
    tokens = sum(output for _, output in jobs(REQUESTS, 4096))

    def run(side: str) -> float:
        command = [sys.executable, "-m", "benchmarks.part08_against_others"]
        command += ["--side", side, "--folder", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.splitlines()[-1])

    seconds = rounds({side: partial(run, side) for side in SIDES}, options.repeats)
    rates = {name: [tokens / value for value in values] for name, values in seconds.items()}
    speed = {name: statistics.median(of_rounds) for name, of_rounds in rates.items()}
    best = {
        kind: max((rate, name) for name, rate in speed.items() if name.startswith(kind))
        for kind in (OURS, PADDED_HF, PAGED_HF, CT2)
    }
    rows = [[name, rate, best[OURS][0] / rate, spread(rates[name])] for rate, name in best.values()]
    columns = [
        "side, at its best setting", "output tokens/s", "this engine, times as fast", "tokens/s in rounds",
    ]  # fmt: skip
    tables = {"race": {"columns": columns, "rows": rows}}
    path = record(
        f"part08_against_others_{options.model.replace('-', '_')}",
        "How does the engine compare with Hugging Face and CTranslate2 on unlike requests, on a CPU?",
        {"model": options.model, "requests": REQUESTS, "prompt_tokens": "8 to 128",
         "output_tokens": "16 to 128", "dtype": "float32", "repeats": options.repeats,
         "torch_threads": "best of 1 and 2"},
        {"tokens_per_second": speed,
         "rounds": {name: quartiles(of_rounds) for name, of_rounds in rates.items()},
         "over_hf_padded": best[OURS][0] / best[PADDED_HF][0],
         "over_hf_generate_batch": best[OURS][0] / best[PAGED_HF][0],
         "over_ctranslate2": best[OURS][0] / best[CT2][0]},
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
