"""Does one request through the whole engine run as fast as Part 3's loop, and as CTranslate2?

    python -m benchmarks.one_request [--repeats 5] [--threads 1 2]

One prompt, 256 tokens after it, greedy, end of sequence ignored, fp32 arithmetic. Two checkpoints:
storyteller, whose weights came from fp16, and a twin whose weights fp16 cannot hold, as GPT-2's own.
`ruvon generate` and `ruvon demo` are run as a user runs them, the latter in a terminal; their story may end
early, and their time is per token, start-up apart. Each measurement has a process of its own; the sides take
turns; figures are medians.
"""

import argparse
import json
import os
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.baseline_hf import PROMPT
from benchmarks.record import ROOT, record
from benchmarks.workloads import fp32_twin
from engine import LLM, SamplingParams
from engine.cache.single import CachedForward
from engine.checkpoint import ZOO
from engine.decoding.greedy import generate
from engine.layers.packed_linear import SharedHalf, pack_linears
from engine.layers.replace import replace_linears
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer

NEW_TOKENS = 256
WITHIN = 5  # runs in each process, of which the fastest counts
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Side = Callable[[str, int], float]  # model folder, threads -> tokens per second


def fastest(run: Callable[[], object]) -> float:
    """Tokens per second of the fastest run after one to warm up."""
    run()
    seconds = []
    for _ in range(WITHIN):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return NEW_TOKENS / min(seconds)


def loop(model: str, threads: int, pack: Callable = pack_linears) -> float:
    tokenizer, packed = Tokenizer.from_pretrained(model), load_model(model, transform=pack)
    prompt = tokenizer.encode(PROMPT)
    return fastest(lambda: generate(CachedForward(packed), tokenizer, packed.config, prompt, PARAMS))


def shared_half(model: torch.nn.Module) -> torch.nn.Module:
    """What remains for fp16 weights when PyTorch has removed the leaner operator."""
    return replace_linears(model, lambda name, linear: SharedHalf(linear))


def llm(model: str, threads: int, **options) -> float:
    engine = LLM(model, **options)
    prompt = {"prompt_token_ids": engine.tokenizer.encode(PROMPT)}
    return fastest(lambda: engine.generate(prompt, PARAMS))


def ctranslate2(model: str, threads: int) -> float:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    tokenizer = Tokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as converted:
        TransformersConverter(model).convert(converted, force=True)
        generator = ctranslate2.Generator(converted, compute_type="float32", intra_threads=threads)
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text())["model"]["vocab"]
    names = {id: name for name, id in vocabulary.items()}
    prompt = [[names[id] for id in tokenizer.encode(PROMPT)]]
    options = {"max_length": NEW_TOKENS, "end_token": [], "include_prompt_in_result": False}
    return fastest(lambda: generator.generate_batch(prompt, **options))


def ruvon_generate(model: str, threads: int) -> float:
    """Time from the first piece of text to the last, by the tokens in between."""
    command = [sys.executable, "-m", "engine.cli.main", "generate", PROMPT, "--model", model]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        times = []
        while os.read(process.stdout.fileno(), 1 << 16):
            times.append(time.perf_counter())
        said = process.stderr.read().decode()
    tokens = int(re.search(r"(\d+) tokens", said)[1])
    return (tokens - 1) / (times[-1] - times[0])


def ruvon_demo(model: str, threads: int) -> float:
    """What it says itself, in a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "engine.cli.main", "demo", "--model", model]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the terminal is closed
            pass
    return float(re.search(r"([\d,]+) tokens/s", shown.decode())[1].replace(",", ""))


LOOP, PLAIN, CT2 = "Part 3's loop, packed weights", "`LLM()`", "CTranslate2, float32"
SIDES: dict[str, Side] = {
    LOOP: loop,
    PLAIN: llm,
    "`LLM(max_num_seqs=1)`": partial(llm, max_num_seqs=1),
    "`ruvon generate`": ruvon_generate,
    "`ruvon demo`": ruvon_demo,
    CT2: ctranslate2,
    "Part 3's loop, without the operator that will be removed": partial(loop, pack=shared_half),
}
ONE_THREAD = ("`ruvon generate`", "`ruvon demo`")  # they choose it themselves for a small model
FROM_FP16 = ("Part 3's loop, without the operator that will be removed",)
MODELS = ("storyteller", "fp32 twin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--side", choices=SIDES, help="measure this one alone, in this process")
    parser.add_argument("--folder", help="with --side: the model")
    options = parser.parse_args()
    if options.side:
        torch.set_num_threads(options.threads[0])
        print(SIDES[options.side](options.folder, options.threads[0]))
        return
    folders = dict(
        zip(MODELS, (str(ZOO / "storyteller"), str(fp32_twin(Path(tempfile.mkdtemp())))), strict=True)
    )

    def run(model: str, side: str, threads: int) -> float:
        command = [sys.executable, "-m", "benchmarks.one_request", "--side", side]
        command += ["--folder", folders[model], "--threads", str(threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.splitlines()[-1])

    wanted = [
        (model, side, threads)
        for model in MODELS
        for threads in options.threads
        for side in SIDES
        if not (side in ONE_THREAD and threads != 1) and not (side in FROM_FP16 and model != "storyteller")
    ]
    found: dict[tuple, list[float]] = {key: [] for key in wanted}
    for _ in range(options.repeats):
        for key in wanted:
            found[key].append(run(*key))
    speed = {key: statistics.median(values) for key, values in found.items()}
    rows, figures = [], {}
    for (model, side, threads), rate in speed.items():
        over_loop, over_ct2 = rate / speed[model, LOOP, threads], rate / speed[model, CT2, threads]
        rows.append([model, side, threads, rate, over_loop, over_ct2])
        figures.setdefault(model.replace(" ", "_"), {}).setdefault(f"threads_{threads}", {})[side] = {
            "tokens_per_second": rate, "over_loop": over_loop, "over_ctranslate2": over_ct2,
        }  # fmt: skip
        print(
            f"{model:12} {side:60} {threads} {rate:6.0f} tokens/s {over_loop:5.2f} {over_ct2:5.2f}",
            flush=True,
        )
    record(
        "one_request",
        "Does one request through the whole engine run as fast as Part 3's loop, and as CTranslate2?",
        {"new_tokens": NEW_TOKENS, "batch": 1, "arithmetic": "float32", "repeats": options.repeats,
         "torch_threads": options.threads},
        figures,
        {"race": {"columns": ["weights", "side", "threads", "tokens/s", "× Part 3's loop", "× CTranslate2"],
                  "rows": rows}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
