"""What the scripts in this folder share: fonts, plain axes, reading of results, the same file on each run,
and terminals that play what was recorded.
"""

import json
import statistics
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


PROMPT, OUTPUT = "#b45309", "#0f766e"


def write_recording(script: str, recorded: dict) -> None:
    """Write what <ruvon-play> plays on the site, beside the picture of the same name."""
    target = Path(script).with_suffix(".play.json")
    target.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    print(target.name, target.stat().st_size // 1024, "kB")


def draw_steps(script: str, recorded: dict, title: str) -> None:
    """A panel for each run of a step player's recording: tokens of each step, and the mean wait."""
    runs, requests = recorded["runs"], recorded["requests"]
    size = (9.6, 1.5 * len(runs) + 0.9)
    figure, axes = plt.subplots(len(runs), 1, figsize=size, sharex=True, layout="constrained")
    for ax, run in zip(axes, runs, strict=True):
        computed, first = [], {}
        for number, step in enumerate(run["steps"], 1):
            work = step["work"].items()
            # A step that reads no prompt computes the last token said, and drafts behind it.
            output = sum(
                tokens for _, (tokens, num_said, *drafts) in work if num_said and tokens == 1 + sum(drafts)
            )
            computed.append((sum(tokens for _, (tokens, *_) in work) - output, output))
            for name, (_, num_said, *_) in work:
                if num_said:
                    first.setdefault(name, number)
        prompts, outputs = zip(*computed, strict=True)
        steps = range(1, len(computed) + 1)
        ax.bar(steps, outputs, width=0.85, color=OUTPUT, label="tokens of outputs")
        ax.bar(steps, prompts, width=0.85, bottom=outputs, color=PROMPT, label="tokens of prompts")
        if run["budget"]:
            ax.axhline(run["budget"], color="#334155", ls="--", lw=0.8)
        wait = statistics.fmean(first[name] - arrives for name, _, _, arrives in requests)
        words = f"{run['words']}: {len(computed)} steps, first word after {wait:.1f} on average"
        ax.set_title(words, loc="left", fontsize=10)
        bare(ax)
    axes[-1].set(xlabel="step", xlim=(0.3, max(len(run["steps"]) for run in runs) + 0.7))
    figure.supylabel("tokens in the step", fontsize=10)
    figure.suptitle(title, x=0.02, ha="left", weight="bold")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=2, frameon=False, fontsize=9)
    save(figure, script)


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
