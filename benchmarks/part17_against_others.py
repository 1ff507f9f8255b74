"""32 unlike requests on a CPU: int8 in this engine beside its own fp32, and beside CTranslate2's int8.

    python -m benchmarks.part17_against_others [--repeats 5]

Part 8's workload: storyteller, prompts of 8 to 128 tokens, outputs of 16 to 128, greedy, end of sequence
ignored; only tokens asked for are counted. Each measurement has a process of its own, the sides take
turns; medians. `two processes`: each takes every second request, on one thread, as CTranslate2's two
workers of one thread do.
"""

import argparse
import statistics
import subprocess
import sys
from functools import partial

import torch

from benchmarks.part08_against_others import PADDED, REQUESTS, Run, ctranslate2_side, timed
from benchmarks.record import ROOT, quartiles, record, show, spread
from benchmarks.workloads import Job, jobs, rounds, run_engine
from engine.layers.packed_linear import pack_linears
from engine.machine.huge_pages import huge_pages
from engine.models.checkpoint import ZOO
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

FOLDER = ZOO / "storyteller"


def engine(method: str | None, slots: int) -> Run:
    def transform(model):
        return pack_linears(model, slots) if method is None else pack_quantized(quantize(model, method))

    with huge_pages():
        model = load_model(FOLDER, transform=transform)
    tokenizer = Tokenizer.from_pretrained(FOLDER)
    make = partial(ContinuousScheduler, max_num_seqs=slots, max_num_batched_tokens=512)
    return lambda work: run_engine(model, tokenizer, work, slots, make)[0]


def two_processes(method: str | None, slots: int) -> Run:
    """Both are ready before the time runs, and it runs until the later one is done."""

    def run(work: list[Job]) -> float:
        command = [sys.executable, "-m", "benchmarks.part17_against_others", "--half", method or "fp32"]
        halves = [
            subprocess.Popen(
                [*command, str(slots), str(i)], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for i in (0, 1)
        ]  # fmt: skip
        for half in halves:
            assert half.stdout.readline() == "ready\n"
        for half in halves:
            half.stdin.write("go\n")
            half.stdin.flush()
        return max(float(half.communicate()[0]) for half in halves)

    return run


def one_half(method: str, slots: int, which: int) -> None:
    torch.set_num_threads(1)
    run, work = engine(None if method == "fp32" else method, slots), jobs(REQUESTS, 4096)
    run([(prompt, 8) for prompt, _ in work[:PADDED]])
    print("ready", flush=True)
    sys.stdin.readline()
    print(run(work[which::2]))


def ctranslate2(size: int) -> Run:
    return partial(timed, ctranslate2_side(FOLDER, 2, 1, size, "int8"))


OURS, CT2 = "this engine", "CTranslate2 int8, two workers of one thread"
SIDES: dict[str, tuple[int, partial]] = {
    **{
        f"{OURS}, {method or 'fp16-packed'}, {threads} threads": (threads, partial(engine, method, 32))
        for method in (None, "int8", "int8_dynamic")
        for threads in (1, 2)
    },
    **{
        f"{OURS}, {method or 'fp16-packed'}, two processes": (1, partial(two_processes, method, 16))
        for method in (None, "int8_dynamic")
    },
    **{f"{CT2}, batches of {size}": (1, partial(ctranslate2, size)) for size in (8, 16)},
}


def measure(side: str) -> float:
    threads, set_up = SIDES[side]
    torch.set_num_threads(threads)
    run, work = set_up(), jobs(REQUESTS, 4096)
    with torch.no_grad():
        if "two processes" not in side:
            run([(prompt, 8) for prompt, _ in work[:PADDED]])
        return run(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help="measure this one alone, in this process")
    parser.add_argument("--half", nargs=3, metavar=("METHOD", "SLOTS", "WHICH"), help="for `two processes`")
    options = parser.parse_args()
    if options.half:
        one_half(options.half[0], int(options.half[1]), int(options.half[2]))
        return
    if options.side:
        print(measure(options.side))
        return

    def run(side: str) -> float:
        command = [sys.executable, "-m", "benchmarks.part17_against_others", "--side", side]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.splitlines()[-1])

    tokens = sum(output for _, output in jobs(REQUESTS, 4096))
    seconds = rounds({side: partial(run, side) for side in SIDES}, options.repeats)
    rates = {side: [tokens / value for value in values] for side, values in seconds.items()}
    speed = {side: statistics.median(of_rounds) for side, of_rounds in rates.items()}
    best = {
        kind: max((rate, side) for side, rate in speed.items() if kind in side)
        for kind in ("fp16-packed", "int8,", "int8_dynamic", "CTranslate2")
    }
    peer = best["CTranslate2"][0]
    rows = [[side, rate, rate / peer, spread(rates[side])] for rate, side in best.values()]
    columns = ["side, at its best setting", "tokens/s", "× CTranslate2", "tokens/s in rounds"]
    tables = {"race": {"columns": columns, "rows": rows}}
    path = record(
        "part17_against_others",
        "32 unlike requests on a CPU: int8 in this engine, beside its own fp32 and CTranslate2's int8",
        {"model": "storyteller", "requests": REQUESTS, "prompt_tokens": "8 to 128",
         "output_tokens": "16 to 128", "repeats": options.repeats},
        {"tokens_per_second": speed,
         "rounds": {side: quartiles(of_rounds) for side, of_rounds in rates.items()},
         "over_ctranslate2": best["int8_dynamic"][0] / peer,
         "over_fp16_packed": best["int8_dynamic"][0] / best["fp16-packed"][0]},
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
