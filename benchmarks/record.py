"""Writes a measurement down so that it can be judged later: machine, versions, commit, workload.

Every benchmark and demo ends here; those that take nothing but whole numbers begin here, too. Tables in
articles and README are rendered from these files by `tools/render_tables.py`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"  # committed
OUT = ROOT / "out"  # not committed: what demos write
DATA = Path(os.environ.get("RUVON_DATA", ROOT.parent / "shared" / "data"))  # texts that are not committed
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "ctranslate2", "numpy", "ray")


def record(
    name: str,
    question: str,
    workload: dict[str, Any],
    figures: dict[str, Any],
    tables: dict[str, dict[str, list]] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write `folder/name.json`. `tables` maps a name to {"columns": [...], "rows": [[...], ...]}."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "question": question,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "workload": workload,
        "figures": figures,
        "tables": tables or {},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def spread(values: Sequence[float]) -> str:
    """From the least to the most of several rounds, as tables show it."""
    return f"{cell_text(float(min(values)))} to {cell_text(float(max(values)))}"


def middle(values: Sequence[float]) -> str:
    """The median of several rounds, and from the least to the most of them, as a cell of a table."""
    return f"{cell_text(float(statistics.median(values)))} ({spread(values)})"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of several rounds, as records keep them."""
    several = values if len(values) > 1 else [*values] * 2
    first, median, third = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": median, "first": first, "third": third}


def read_record(name: str) -> dict[str, Any]:
    """What `record` has written to results/name.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def derive(
    name: str,
    source: str,
    question: str,
    figures: dict[str, Any],
    tables: dict[str, dict[str, list]] | None = None,
) -> Path:
    """Write results/name.json: what was reckoned from the record `source`, with its machine and date."""
    content = read_record(source) | {"question": question, "figures": figures, "tables": tables or {}}
    content["workload"] = content["workload"] | {"reckoned_from": source}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def corpus(path: Path) -> str:
    """The text of a file, such as those of DATA. Without it the program ends, and says what it needs."""
    if not path.is_file():
        sys.exit(f"needs the text {path.name}, and there is no {path}; RUVON_DATA names the folder of texts")
    return path.read_text(encoding="utf-8")


def whole_numbers(question: str, **defaults: int) -> argparse.Namespace:
    """The command line of a benchmark that takes whole numbers: `--name N` for each of `defaults`."""
    parser = argparse.ArgumentParser(description=question)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def show(path: Path, tables: dict[str, dict[str, list]]) -> None:
    """Print tables under their titles, and where the record lies."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, content in tables.items():
        rows = [[cell_text(cell) for cell in row] for row in content["rows"]]
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for at, name in enumerate(content["columns"]):
            # Names and words may be wrapped; no number is cut off.
            words = " ".join([name, *(row[at] for row in rows)]).split()
            table.add_column(name, min_width=max(map(len, words), default=0))
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"Written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def cell_text(cell: object) -> str:
    """How a cell of a table is written, in a terminal and in the articles."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, torch threads, and the GPU where there is one."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory[0] / 2**20, 1) if memory else None,
        "system": platform.system(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def commit() -> str | None:
    """The commit measured, with `+` when the tree had changes; None outside a git checkout."""
    try:
        sha = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "engine"], cwd=ROOT, capture_output=True
        )
    except FileNotFoundError:
        return None
    return sha.stdout.strip() + ("+" if changed.returncode else "") if sha.returncode == 0 else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
