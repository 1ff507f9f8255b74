"""Does one request through the whole engine run as fast as Part 3's loop, and as CTranslate2?

    python -m benchmarks.one_request [--repeats 12] [--threads 1 2]

One prompt, 256 tokens after it, greedy, end of sequence ignored, fp32 arithmetic. Two checkpoints:
storyteller, whose weights came from fp16, and a twin whose weights fp16 cannot hold, as GPT-2's own. All
sides share a process and take turns, so that a machine that wavers wavers for all: each ratio is the median
over the rounds of one round's two times. `ruvon generate` and `ruvon demo` are run as a user runs them, the
latter in a terminal, each between two runs of the loop in processes of their own; their story may end early,
and their time is per token, start-up apart.
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
from engine.decoding.greedy import generate
from engine.layers.packed_linear import SharedHalf, pack_linears
from engine.layers.replace import replace_linears
from engine.models.checkpoint import ZOO
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

NEW_TOKENS = 256
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Side = Callable[[str, int], Callable[[], object]]  # model folder, threads -> a run


def loop(model: str, threads: int, pack: Callable = pack_linears) -> Callable[[], object]:
    tokenizer, packed = Tokenizer.from_pretrained(model), load_model(model, transform=pack)
    prompt = tokenizer.encode(PROMPT)
    return lambda: generate(CachedForward(packed), tokenizer, packed.config, prompt, PARAMS)


def shared_half(model: torch.nn.Module) -> torch.nn.Module:
    """What remains for fp16 weights when PyTorch has removed the leaner operator."""
    return replace_linears(model, lambda name, linear: SharedHalf(linear))


def llm(model: str, threads: int, **options) -> Callable[[], object]:
    engine = LLM(model, **options)
    prompt = {"prompt_token_ids": engine.tokenizer.encode(PROMPT)}
    return lambda: engine.generate(prompt, PARAMS)


def ctranslate2(model: str, threads: int) -> Callable[[], object]:
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
    return lambda: generator.generate_batch(prompt, **options)


def ruvon_generate(model: str) -> float:
    """Time from the first piece of text to the last, by the tokens in between."""
    command = [sys.executable, "-m", "engine.cli.main", "generate", PROMPT, "--model", model]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        times = []
        while os.read(process.stdout.fileno(), 1 << 16):
            times.append(time.perf_counter())
        said = process.stderr.read().decode()
    tokens = int(re.search(r"(\d+) tokens", said)[1])
    return (tokens - 1) / (times[-1] - times[0])


def ruvon_demo(model: str) -> float:
    """What it says itself, in a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "engine.cli.main", "demo", "--story", "--model", model]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the terminal is closed
            pass
    return float(re.search(r"([\d,]+) tokens/s", shown.decode())[1].replace(",", ""))


LOOP, CT2 = "Part 3's loop, packed weights", "CTranslate2, float32"
OLD = "Part 3's loop, without the operator that will be removed"
SIDES: dict[str, Side] = {
    "`LLM()`": llm,  # the first to be loaded, as in its users' processes: huge pages want memory that is new
    LOOP: loop,
    "`LLM(max_num_seqs=1)`": partial(llm, max_num_seqs=1),
    '`LLM(kv_cache="slots")`': partial(llm, kv_cache="slots"),
    CT2: ctranslate2,
    OLD: partial(loop, pack=shared_half),
}
COMMANDS = {"`ruvon generate`": ruvon_generate, "`ruvon demo --story`": ruvon_demo}
MODELS = ("storyteller", "fp32 twin")
KEYS = {
    LOOP: "loop", "`LLM()`": "llm", "`LLM(max_num_seqs=1)`": "llm_one_seat",
    "`LLM(kv_cache=\"slots\")`": "llm_slots", CT2: "ctranslate2",
    OLD: "loop_without_operator", "`ruvon generate`": "ruvon_generate", "`ruvon demo --story`": "ruvon_demo",
}  # fmt: skip


def take_turns(model: str, sides: list[str], threads: int, rounds: int) -> dict[str, list[float]]:
    """side -> tokens per second of each round. To be called in a fresh process."""
    torch.set_num_threads(threads)
    runs = {name: SIDES[name](model, threads) for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            rates[name].append(NEW_TOKENS / (time.perf_counter() - start))
    return {name: values[1:] for name, values in rates.items()}  # the first round warms up


def in_a_process(model: str, sides: list[str], threads: int, rounds: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.one_request", "--sides", *sides, "--folder", model]
    command += ["--threads", str(threads), "--repeats", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def beside_the_loop(model: str, rounds: int) -> dict[str, list[float]]:
    """As `in_a_process`, of the commands, which use one thread for a small model."""
    rates: dict[str, list[float]] = {name: [] for name in (LOOP, *COMMANDS)}
    for _ in range(rounds):
        before = statistics.median(in_a_process(model, [LOOP], 1, 3)[LOOP])
        for name, run in COMMANDS.items():
            rates[name].append(run(model))
        after = statistics.median(in_a_process(model, [LOOP], 1, 3)[LOOP])
        rates[LOOP].append((before + after) / 2)
    return rates


def ratio(rates: dict[str, list[float]], side: str, other: str) -> float | None:
    if other not in rates:
        return None
    return statistics.median(a / b for a, b in zip(rates[side], rates[other], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="measure these alone, in this process")
    parser.add_argument("--folder", help="with --sides: the model")
    options = parser.parse_args()
    if options.sides:
        print(json.dumps(take_turns(options.folder, options.sides, options.threads[0], options.repeats)))
        return
    folders = dict(
        zip(MODELS, (str(ZOO / "storyteller"), str(fp32_twin(Path(tempfile.mkdtemp())))), strict=True)
    )
    rows, figures = [], {}

    def note(model: str, threads: int, rates: dict[str, list[float]], sides: list[str]) -> None:
        for side in sides:
            rate = statistics.median(rates[side])
            over_loop, over_ct2 = ratio(rates, side, LOOP), ratio(rates, side, CT2)
            rows.append([model, side, threads, rate, over_loop, over_ct2])
            own = figures.setdefault(model.replace(" ", "_"), {}).setdefault(f"threads_{threads}", {})
            own[KEYS[side]] = {
                "tokens_per_second": rate, "over_loop": over_loop, "over_ctranslate2": over_ct2,
            }  # fmt: skip
            print(*rows[-1], sep="  ", flush=True)

    for model, folder in folders.items():
        for threads in options.threads:
            sides = [side for side in SIDES if side != OLD or model == "storyteller"]
            note(model, threads, in_a_process(folder, sides, threads, options.repeats), sides)
        note(model, 1, beside_the_loop(folder, max(1, options.repeats // 3)), list(COMMANDS))
    record(
        "one_request",
        "Does one request through the whole engine run as fast as Part 3's loop, and as CTranslate2?",
        {"new_tokens": NEW_TOKENS, "batch": 1, "arithmetic": "float32", "rounds": options.repeats,
         "torch_threads": options.threads},
        figures,
        {"race": {"columns": ["weights", "side", "threads", "tokens/s", "× Part 3's loop", "× CTranslate2"],
                  "rows": rows}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
