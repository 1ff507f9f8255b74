"""What the scripts in this folder share: fonts, plain axes, reading of results, the same file on each run,
and terminals that play what was recorded.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})


def result(name: str) -> dict:
    """What benchmarks/NAME.py has written."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def bare(ax: plt.Axes, *more: str) -> None:
    """No frame at the top and on the right, nor where `more` says."""
    ax.spines[["top", "right", *more]].set_visible(False)


def save(figure: plt.Figure, script: str, tight: bool = True) -> None:
    """Write the figure beside its script, as SVG; `tight` cuts the margin off."""
    target = Path(script).with_suffix(".svg")
    plt.rcParams["svg.hashsalt"] = target.stem  # else the names inside differ from run to run
    figure.savefig(target, bbox_inches="tight" if tight else None, metadata={"Date": None})
    print(target.name)


CELL, LINE, EDGE = 8.4, 19, 16  # pixels
TERMINAL = """
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #e8edf3; }
text { white-space: pre; }
.dim { fill: #9aa6b4; } .own { fill: #8ab4ff; } .then { visibility: hidden; }
@keyframes on { from, to { visibility: visible; } }
@keyframes off { from, to { visibility: hidden; } }
@media (prefers-reduced-motion: reduce) { text { animation: none !important; } }
"""
# Of a terminal: number, its SVG, class, from when, until when (None: to the end)
Row = tuple[int, str, str, float, float | None]


def play(script: str, rows: Iterable[Row], columns: int, label: str, style: str = "") -> None:
    """Write a terminal beside its script, as an SVG that plays once and ends as a picture."""
    shown = list(rows)
    count = 1 + max(number for number, *_ in shown)
    width, height = round(columns * CELL + 2 * EDGE), count * LINE + 2 * EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{label}">'
    )
    ground = f'<rect width="{width}" height="{height}" rx="10" fill="#0e1217"/>'
    body = "\n".join(_row(*row) for row in shown)
    target = Path(script).with_suffix(".svg")
    target.write_text(f"{head}<style>{TERMINAL}{style}</style>\n{ground}\n{body}\n</svg>\n", encoding="utf-8")
    print(target.name, target.stat().st_size // 1024, "kB,", count, "rows")


def _row(number: int, markup: str, kind: str, since: float, until: float | None) -> str:
    kind = " ".join(filter(None, [kind, "then" if until is not None else ""]))
    motion = f"off {since:.2f}s" if until is None else f"on {until - since:.2f}s {since:.2f}s"
    return (
        f'<text x="{EDGE}" y="{EDGE + LINE * (number + 0.75):g}" xml:space="preserve" class="{kind}" '
        f'style="animation:{motion}">{markup}</text>'
    )
