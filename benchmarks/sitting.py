"""Records benchmarks, each between two yardsticks. What a restless machine gave is put back.

    python -m benchmarks.sitting part03_kv_cache part07_batching
    python -m benchmarks.sitting "part02_growth --repeats 5"        # a benchmark with its own options
    python -m benchmarks.sitting --patience 60 --tries 3 part03_kv_cache

A yardstick is work that no change of ours can make faster: a bare read of 64 MB (memory), a product of two
matrices (arithmetic) and an argmax of a short row (calls). It is timed before and after each benchmark, in a
process of its own, with one thread. A record is kept, with both yardsticks in it, if each measure has the
same median before and after to within a tenth, and lay within a tenth of its first quartile: a neighbour on a
shared machine only ever makes it slower, so the machine was itself at least half of the time, and medians
over alternated rounds hold. Otherwise the record that was there before stands again.

Before a benchmark begins, up to `--patience` yardsticks (some seconds each) wait for a quiet one. What was
refused is tried again when all others had their turn, up to `--tries` times in all. The exit status is 1 if
something was not kept in the end.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import RESULTS, ROOT

ROUNDS = 161  # some four seconds: what disturbs comes and goes within one
MOST = 1.1  # times as long: more than that is another machine

Measures = dict[str, dict[str, float]]  # of each measure: median, first and third quartile, in ms


def yardstick(rounds: int = ROUNDS) -> Measures:
    """Time each measure once a round, in turns, so that a slow moment is everybody's."""
    torch.set_num_threads(1)
    memory, matrix, row = torch.ones(2**24), torch.ones(384, 384), torch.arange(1024.0)
    work: dict[str, Callable[[], object]] = {
        "read of 64 MB": memory.sum,
        "product": lambda: [matrix @ matrix for _ in range(8)],
        "argmax": lambda: [row.argmax() for _ in range(1000)],
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 2):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: measure(times[2:]) for name, times in taken.items()}  # the first two rounds warm up


def measure(times: list[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(times, n=4)
    return {"median_ms": round(median, 4), "first_ms": round(first, 4), "third_ms": round(third, 4)}


def unquiet(measures: Measures) -> str | None:
    """Why a yardstick is not quiet; None if it is."""
    for name, seen in measures.items():
        if seen["median_ms"] > MOST * seen["first_ms"]:
            return f"{name} took {seen['median_ms']:.3g} ms, and {seen['first_ms']:.3g} in its faster quarter"
    return None


def restless(before: Measures, after: Measures) -> str | None:
    """Why what was recorded between the two yardsticks is not kept; None if the machine stayed the same."""
    for when, measures in (("before", before), ("after", after)):
        if why := unquiet(measures):
            return f"{when} it, {why}"
    for name in before:
        medians = before[name]["median_ms"], after[name]["median_ms"]
        if max(medians) > MOST * min(medians):
            return f"{name} took {medians[0]:.3g} ms before and {medians[1]:.3g} ms after"
    return None


def in_its_own_process() -> Measures:
    """`yardstick` where nothing of a benchmark is in memory."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.sitting", "--yardstick"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout)


def run(benchmark: str) -> int:
    """Run a benchmark, with its options; its exit status."""
    name, *options = shlex.split(benchmark)
    return subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], cwd=ROOT).returncode


def sit(
    benchmark: str,
    run: Callable[[str], int] = run,
    yardstick: Callable[[], Measures] = in_its_own_process,
    folder: Path = RESULTS,
    patience: int = 1,
) -> str | None:
    """Run a benchmark between two yardsticks, once one of the first `patience` is quiet. Why its records were
    not kept, or None: they were.
    """
    pattern = benchmark.split()[0] + "*.json"
    stood = {path: path.read_bytes() for path in folder.glob(pattern)}
    for _ in range(patience):
        before = yardstick()
        why = unquiet(before)
        if why is None:
            break
    else:
        return f"it was not begun, {patience} yardsticks were not quiet: {why}"
    status = run(benchmark)
    after = yardstick()
    why = f"it ended with status {status}" if status else restless(before, after)
    for path in folder.glob(pattern):
        if stood.get(path) == path.read_bytes():
            continue
        if why is None:
            content = json.loads(path.read_text()) | {"yardstick": {"before": before, "after": after}}
            path.write_text(json.dumps(content, indent=1) + "\n")
        elif path in stood:
            path.write_bytes(stood[path])
        else:
            path.unlink()
    return why


def sit_all(benchmarks: list[str], tries: int, sit: Callable[[str], str | None] = sit) -> list[str]:
    """Each in turn, then those that were refused again, up to `tries` times: those that never were kept."""
    left = benchmarks
    for number in range(1, tries + 1):
        refused = []
        for benchmark in left:
            start = time.perf_counter()
            why = sit(benchmark)
            seconds = time.perf_counter() - start
            came = f"not kept: {why}" if why else "kept"
            print(f"{benchmark}, try {number}, {seconds:.0f} s: {came}", flush=True)
            refused += [benchmark] if why else []
        left = refused
    return left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK")
    parser.add_argument("--patience", type=int, default=40, help="yardsticks that wait for a quiet one")
    parser.add_argument("--tries", type=int, default=2, help="of each benchmark")
    parser.add_argument("--yardstick", action="store_true", help="print one, and record nothing")
    options = parser.parse_args()
    if options.yardstick:
        print(json.dumps(yardstick()))
    elif not options.benchmarks or min(options.patience, options.tries) < 1:
        parser.error("name a benchmark; --patience and --tries are at least 1")
    else:
        sys.exit(bool(sit_all(options.benchmarks, options.tries, partial(sit, patience=options.patience))))


if __name__ == "__main__":
    main()
