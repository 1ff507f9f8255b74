"""How fast is this engine beside vLLM, on a CPU, with the same weights, prompts, lengths and fp32?

    python -m benchmarks.against_vllm --vllm-python VENV/bin/python [--models storyteller gpt2 llama]
    python -m benchmarks.against_vllm --vllm-python VENV/bin/python --quick    # does it run?

vLLM has an environment of its own: its build for CPUs, and Intel's OpenMP beside it; tcmalloc is Debian's
(benchmarks/README.md says how). Offline, each engine is a process (against_vllm_side.py) that has loaded the
same folder; both run the same lines. Each is tried in several settings, vLLM's in one process with threads
bound to cores, compiled and eager, both libraries preloaded as its documents say. For each workload the best
setting of each engine races: the engines take turns, and whoever waits is stopped. The greedy ids are
compared. Then both serve (against_vllm_served.py). A busy machine is refused, unless with --quick.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.against_vllm_served import served_race
from benchmarks.against_vllm_settings import OURS, SETTINGS, THEIRS, Setting, vllm_versions
from benchmarks.part08_against_others import gpt2_shape
from benchmarks.processes import Racer
from benchmarks.record import OUT, RESULTS, quartiles, record, show
from benchmarks.shapes import llama_110m
from benchmarks.workloads import Job
from engine.models.checkpoint import ZOO

QUESTION = "How fast is this engine beside vLLM on a CPU, with the same weights, prompts, lengths and fp32?"
MOST_BUSY = 0.15  # share of the processors' time that others may take
COPIED = 2**28  # bytes, beyond any cache
MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Scale:
    """A model, and how much each workload asks of it."""

    title: str
    make: Callable[[Path], Path]  # where its files are, or are put
    vocab_size: int
    one: int  # output tokens of one request alone
    eight: int  # of each of eight
    longest: int  # of 32 mixed requests, the longest output; the shortest has an eighth
    served: int  # requests to a server, of 64 tokens in and 32 out
    exact: bool  # trained weights: both engines must give the same ids


SCALES = {
    "storyteller": Scale("storyteller", lambda _: ZOO / "storyteller", 4096, 256, 128, 128, 64, True),
    "gpt2": Scale("GPT-2 124M's shape", gpt2_shape, 50257, 48, 32, 64, 24, False),
    "llama": Scale("a Llama's shape, 110M", llama_110m, 32000, 48, 32, 64, 24, False),
}


def workloads(scale: Scale, quick: bool) -> dict[str, list[Job]]:
    """Random prompts: which tokens does not matter, only that both have the same."""
    random = Random(0)

    def prompt(tokens: int) -> list[int]:
        return [random.randrange(5, scale.vocab_size) for _ in range(tokens)]

    shrink = 8 if quick else 1
    mixed = [
        (prompt(random.randint(8, 128)), max(2, random.randint(scale.longest // 8, scale.longest) // shrink))
        for _ in range(32 // shrink)
    ]
    return {
        "one stream": [(prompt(32), scale.one // shrink)],
        "eight streams": [(prompt(32), scale.eight // shrink) for _ in range(8)],
        "32 mixed": mixed,
    }


def busy_share(seconds: float = 2.0) -> float:
    """The share of the processors' time that is taken while this process sleeps."""

    def now() -> tuple[int, int]:
        numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return sum(numbers), numbers[3] + numbers[4]  # all, and idle or waiting for a disk

    before = now()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(now(), before, strict=True))
    return 1 - idle / total


def copy_rate() -> float:
    """GB/s that one thread copies, bytes read and bytes written: the yardstick of this machine's memory."""
    torch.set_num_threads(1)
    source, target = torch.ones(COPIED // 4), torch.ones(COPIED // 4)
    start = time.perf_counter()
    target.copy_(source)
    return 2e-9 * COPIED / (time.perf_counter() - start)


def generated(racer: Racer, jobs: list[Job]) -> tuple[float, list[list[int]]]:
    """Output tokens a second of one call, and the ids."""
    with racer:
        answer = racer.ask({"jobs": jobs})
    tokens = sum(output for _, output in jobs)
    assert sum(map(len, answer["ids"])) == tokens
    return tokens / answer["seconds"], answer["ids"]


def started(settings: dict[str, Setting], folder: Path, python: Path, logs: Path) -> dict[str, Racer]:
    """A process for each setting, loaded and stopped. vLLM's load at the same time; ours, which measure
    layouts of weights while they load, one after the other, when the machine is quiet again.
    """
    racers: dict[str, Racer] = {}
    try:
        for engine in (THEIRS, OURS):
            for name, setting in settings.items():
                if setting.engine == engine:
                    racers[name] = setting.offline(folder, python, logs / f"{len(racers)}.txt", MAX_MODEL_LEN)
                    if engine == OURS:
                        ready(racers[name])
            if engine == THEIRS:
                for racer in racers.values():
                    ready(racer)
    except BaseException:
        for racer in racers.values():
            racer.end()
        raise
    return racers


def ready(racer: Racer) -> None:
    with racer:
        racer.answer()


def offline_race(
    scale: Scale, settings: dict[str, Setting], folder: Path, python: Path, rounds: int, quick: bool
) -> dict[str, Any]:
    """For each workload: the settings tried, the best of each engine, its rounds, and the ids compared."""
    work = workloads(scale, quick)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        racers = started(settings, folder, python, logs)
        for racer in racers.values():
            stack.callback(racer.end)
            generated(racer, [(prompt, 4) for prompt, _ in work["32 mixed"]])  # warms up
        for name, jobs in work.items():
            tried = {side: generated(racer, jobs)[0] for side, racer in racers.items()}
            best = {
                engine: max((rate, side) for side, rate in tried.items() if settings[side].engine == engine)[
                    1
                ]
                for engine in (OURS, THEIRS)
            }
            rates: dict[str, list[float]] = {engine: [] for engine in best}
            ids: dict[str, list[list[int]]] = {}
            copies = []
            for _ in range(rounds):
                copies.append(copy_rate())
                for engine, side in best.items():
                    rate, ids[engine] = generated(racers[side], jobs)
                    rates[engine].append(rate)
            equal = sum(a == b for a, b in zip(ids[OURS], ids[THEIRS], strict=True))
            assert equal == len(jobs) or not scale.exact, f"{name}: {equal} of {len(jobs)} have the same ids"
            found[name] = {
                "tried": tried, "best": best, "tokens_per_second": rates, "copy_gb_per_second": copies,
                "requests": len(jobs), "equal_ids": equal,
            }  # fmt: skip
            print(name, tried, rates, f"{equal} of {len(jobs)} equal", flush=True)
    return found


def offline_table(found: dict[str, Any]) -> dict[str, list]:
    rows = []
    for name, one in found.items():
        theirs = statistics.median(one["tokens_per_second"][THEIRS])
        for engine in (OURS, THEIRS):
            rates = one["tokens_per_second"][engine]
            middle, first, third = quartiles(rates).values()
            same = f"{one['equal_ids']} of {one['requests']}"
            rows.append([name, one["best"][engine], middle, first, third, middle / theirs, same])
    columns = ["requests", "engine, at its best setting", "tokens/s", "lower quartile", "upper quartile"]
    return {"columns": [*columns, "× vLLM", "same ids"], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--vllm-python", type=Path, required=True, help="the interpreter that has vLLM")
    parser.add_argument("--models", choices=SCALES, nargs="+", default=list(SCALES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served-rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of little work, and no record")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever was started is ended then, too
    python = options.vllm_python.absolute()  # not resolved: a virtual environment is known by its link
    busy = busy_share()
    if not options.quick and busy > MOST_BUSY:
        sys.exit(f"others take {busy:.0%} of this machine's time, and at most {MOST_BUSY:.0%} is accepted")
    rounds, served_rounds = (1, 1) if options.quick else (options.rounds, options.served_rounds)
    settings = {name: one for name, one in SETTINGS.items() if one.quick or not options.quick}
    for model in options.models:
        scale, start = SCALES[model], time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = scale.make(Path(name))
            offline = offline_race(scale, settings, folder, python, rounds, options.quick)
            fastest = {engine: settings[offline["32 mixed"]["best"][engine]] for engine in (OURS, THEIRS)}
            requests = 4 if options.quick else scale.served
            served, table = served_race(
                fastest, folder, python, requests, served_rounds, MAX_MODEL_LEN, scale.exact
            )
        workload = {
            "model": scale.title, "dtype": "float32", "max_model_len": MAX_MODEL_LEN, "prefix_caching": False,
            "torch_threads": [1, os.cpu_count()], "rounds": rounds, "served_rounds": served_rounds,
            "vllm": vllm_versions(python), "busy_before": busy, "quick": options.quick,
        }  # fmt: skip
        tables = {"offline": offline_table(offline), "served": table}
        figures = {"offline": offline, "served": served, "minutes": (time.perf_counter() - start) / 60}
        path = record(
            f"against_vllm_{model}", QUESTION, workload, figures, tables, OUT if options.quick else RESULTS
        )
        show(path, tables)


if __name__ == "__main__":
    main()
