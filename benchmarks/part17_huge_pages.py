"""What do huge pages gain on a CPU? One request, with the weights on pages of 4 KiB and on huge ones.

    python -m benchmarks.part17_huge_pages [--rounds 5] [--tokens 16]

Part 3's loop, one thread, greedy, random weights in GPT-2 124M's shape in fp32, int8 and int8_dynamic, and
storyteller's shape in fp32. Memory once on huge pages stays there: so each measurement is a process of its
own, the two kinds take turns, and each ratio is the median over the rounds of one round's two times.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.part08_against_others import gpt2_shape
from benchmarks.part17_one_request import ours
from benchmarks.record import ROOT, middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import fp32_twin, ratios
from engine.machine.huge_pages import huge_pages

SHAPES = {"storyteller": fp32_twin, "GPT-2 124M": gpt2_shape}
SIDES = {
    "storyteller, fp32": ("storyteller", "fp32"),
    "GPT-2 124M, fp32": ("GPT-2 124M", "fp32"),
    "GPT-2 124M, int8": ("GPT-2 124M", "int8"),
    "GPT-2 124M, int8_dynamic": ("GPT-2 124M", "int8_dynamic"),
}
PAGES = {"small": nullcontext, "huge": huge_pages}
RUNS = 3


def one(folder: str, method: str, pages: str, tokens: str) -> None:
    """Prints ms a token, the best of RUNS."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        run = ours(Path(folder), int(tokens), None if method == "fp32" else method, PAGES[pages])
        run()
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    print(min(times) / int(tokens) * 1e3)


def measured(folder: Path, method: str, pages: str, tokens: int) -> float:
    command = [sys.executable, "-m", "benchmarks.part17_huge_pages", "--one", folder, method, pages, tokens]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5, tokens=16)
    times: dict[str, dict[str, list[float]]] = {side: {pages: [] for pages in PAGES} for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folders = {shape: make(Path(name) / shape) for shape, make in SHAPES.items()}
        for _ in range(args.rounds):
            for side, (shape, method) in SIDES.items():
                for pages in PAGES:
                    times[side][pages].append(measured(folders[shape], method, pages, args.tokens))
    rows, figures = [], {"rounds": {}}
    for side, of in times.items():
        gains = ratios(of, "huge")["small"]
        rows.append([side, *(middle(of[pages]) for pages in PAGES), middle(gains)])
        key = side.replace("-", "").replace(", ", "_").replace(" ", "_").lower()
        figures[key] = statistics.median(gains)
        figures["rounds"][key] = quartiles(gains)
    columns = ["", "4 KiB, ms a token", "huge, ms a token", "gain"]
    tables = {"gain": {"columns": columns, "rows": rows}}
    path = record(
        "part17_huge_pages",
        __doc__.splitlines()[0],
        {"rounds": args.rounds, "runs": RUNS, "new_tokens": args.tokens, "batch": 1, "torch_threads": 1},
        figures,
        tables,
    )
    show(path, tables)


if __name__ == "__main__":
    if "--one" in sys.argv:
        one(*sys.argv[2:])
    else:
        main()
