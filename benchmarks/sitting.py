"""Records benchmarks, each between two yardsticks. What a restless machine gave is put back.

    python -m benchmarks.sitting part03_kv_cache part07_batching
    python -m benchmarks.sitting "part02_growth --repeats 5"        # a benchmark with its own options
    python -m benchmarks.sitting --patience 60 --tries 3 part03_kv_cache
    python -m benchmarks.sitting --reference day.json part05_sampling       # the sitting goes on another time

A yardstick is work that no change of ours can make faster: a bare read of 64 MB (memory), a product of two
matrices (arithmetic) and an argmax of a short row (calls). It is timed before and after each benchmark, in a
process of its own, with one thread, for so long that neighbours on a shared machine, who come and go several
times in a second, are in its mean as they are in a benchmark's. Beside the mean it has the fastest tenth:
what the work takes where nobody disturbs it. A record is kept, with its yardsticks in it, if each mean is the
same in them to within a tenth, also at the sitting's reference. Otherwise the record that was there before
stands again. So all that a sitting keeps was measured on a machine in one state, and each record says how far
that was from idle. Where no machine keeps to a tenth, `--within 1.3` accepts means up to 1.3 times as long,
and each record says so. The rounds of a benchmark are not judged: README.md of this folder says why.

The reference is the first yardstick, of up to three, that agrees with one before it: one alone may be odd.
Before a benchmark begins, up to `--patience` yardsticks wait for one that agrees with it; the one after the
last benchmark counts as the first of them. What was refused is tried again when all others had their turn, up
to `--tries` times in all. The exit status is 1 if something was not kept in the end.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import RESULTS, ROOT

ROUNDS = 640  # some sixteen seconds
WITHIN = 1.1  # times as long: more than that is another machine
REFERENCE = "at the sitting's reference"

Measures = dict[str, dict[str, float]]  # of each measure: the mean and the fastest tenth, in ms


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
    """From times in ms, two or more."""
    tenth = statistics.quantiles(times, n=10, method="inclusive")[0]
    return {"mean_ms": round(statistics.fmean(times), 4), "tenth_ms": round(tenth, 4)}


class Restless(Exception):
    """Why the machine is not still enough to measure on."""


def changed(yardsticks: dict[str, Measures], within: float) -> str | None:
    """Why the machine is not the same in all yardsticks, named by when they were taken; None if it is: no
    mean is longer than `within` times another.
    """
    for (when, one), (later, other) in combinations(yardsticks.items(), 2):
        for name in one:
            means = one[name]["mean_ms"], other[name]["mean_ms"]
            if max(means) > within * min(means):
                return f"{name} took {means[0]:.3g} ms {when} and {means[1]:.3g} ms {later}"
    return None


def agree_on_reference(yardstick: Callable[[], Measures], within: float) -> Measures:
    """The first of three yardsticks that agrees with one before it. Restless: none does."""
    seen = [yardstick()]
    for _ in range(2):
        seen.append(yardstick())
        if any(changed({"before": earlier, "now": seen[-1]}, within) is None for earlier in seen[:-1]):
            return seen[-1]
    why = changed({"at the second": seen[1], "at the third": seen[2]}, within)
    raise Restless(f"no two of three yardsticks agreed: {why}")


def reference_of(path: Path | None, within: float) -> Measures:
    """The reference of the sitting that wrote `path`, or a new one, which is written there."""
    if path is not None and path.exists():
        return json.loads(path.read_text())
    reference = agree_on_reference(in_its_own_process, within)
    if path is not None:
        path.write_text(json.dumps(reference) + "\n")
    return reference


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


@dataclass
class Sitting:
    """Runs benchmarks on a machine in one state. The yardstick after one benchmark is the first before the
    next.
    """

    reference: Measures
    within: float  # as in `changed`
    patience: int = 1  # yardsticks that wait for one that agrees with the reference
    run: Callable[[str], int] = run
    yardstick: Callable[[], Measures] = in_its_own_process
    folder: Path = RESULTS
    latest: Measures | None = None  # after the last benchmark

    def sit(self, benchmark: str) -> str | None:
        """Run a benchmark between two yardsticks. Why its records were not kept, or None: they were."""
        pattern = benchmark.split()[0] + "*.json"
        stood = {path: path.read_bytes() for path in self.folder.glob(pattern)}
        try:
            before = self._wait()
        except Restless as error:
            return f"it was not begun, {error}"
        status = self.run(benchmark)
        after = self.latest = self.yardstick()
        if status:
            why = f"it ended with status {status}"
        else:
            yardsticks = {"before it": before, "after it": after, REFERENCE: self.reference}
            why = changed(yardsticks, self.within)
        recorded = {"reference": self.reference, "before": before, "after": after, "within": self.within}
        for path in self.folder.glob(pattern):
            if stood.get(path) == path.read_bytes():
                continue
            if why is None:
                content = json.loads(path.read_text()) | {"yardstick": recorded}
                path.write_text(json.dumps(content, indent=1) + "\n")
            elif path in stood:
                path.write_bytes(stood[path])
            else:
                path.unlink()
        return why

    def _wait(self) -> Measures:
        """The first yardstick that agrees with the reference. Restless: none of `patience` does."""
        for _ in range(self.patience):
            measures = self.yardstick() if self.latest is None else self.latest
            self.latest = None
            why = changed({REFERENCE: self.reference, "before it": measures}, self.within)
            if why is None:
                return measures
        raise Restless(f"{self.patience} yardsticks were refused, the last: {why}")


def sit_all(benchmarks: list[str], tries: int, sit: Callable[[str], str | None]) -> list[str]:
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
    parser.add_argument("--patience", type=int, default=40, help="yardsticks that wait for one that agrees")
    parser.add_argument("--tries", type=int, default=2, help="of each benchmark")
    parser.add_argument("--within", type=float, default=WITHIN, help="times as long that a mean may take")
    parser.add_argument("--reference", type=Path, help="file of the reference; made if it is not there")
    parser.add_argument("--yardstick", action="store_true", help="print one, and record nothing")
    options = parser.parse_args()
    if options.yardstick:
        print(json.dumps(yardstick()))
    elif not options.benchmarks or not all(
        number >= 1 for number in (options.patience, options.tries, options.within)
    ):
        parser.error("name a benchmark; --patience, --tries and --within are at least 1")
    else:
        try:
            reference = reference_of(options.reference, options.within)
        except Restless as error:
            sys.exit(f"nothing was begun, {error}")
        sitting = Sitting(reference, options.within, options.patience)
        sys.exit(bool(sit_all(options.benchmarks, options.tries, sitting.sit)))


if __name__ == "__main__":
    main()
