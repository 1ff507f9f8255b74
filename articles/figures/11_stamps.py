"""One request's stamps on a line, and the times between them.

python articles/figures/11_stamps.py      # writes 11_stamps.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK, GREY = "#222222", "#666666"
COLOURS = {"queue": "#fde68a", "prefill": "#bfdbfe", "decode": "#bbf7d0"}
ARRIVAL, SCHEDULED, TOKENS = 10.0, 10.4, (10.5, 10.6, 10.7, 11.1, 11.2)
plt.rcParams.update({"svg.hashsalt": "11_stamps", "font.family": "DejaVu Sans", "font.size": 10})


def span(ax, y: float, start: float, end: float, words: str) -> None:
    """A double arrow with words above it."""
    ax.annotate(
        "", (start, y), (end, y), arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    )
    ax.text((start + end) / 2, y + 0.1, words, ha="center", va="bottom", fontsize=9)


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.7))
    ax.set(xlim=(9.93, 11.29), ylim=(-1.75, 3.25), xlabel="seconds of the engine's clock", yticks=[])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    first, last = TOKENS[0], TOKENS[-1]
    for name, start, end in (
        ("queue", ARRIVAL, SCHEDULED),
        ("prefill", SCHEDULED, first),
        ("decode", first, last),
    ):
        ax.barh(0, end - start, left=start, height=0.8, color=COLOURS[name], edgecolor=INK, lw=0.8)
        ax.text((start + end) / 2, 0, name, ha="center", va="center", weight="bold", fontsize=9)
    for i, when in enumerate(TOKENS):
        ax.plot([when, when], [-0.4, -0.75], color=INK, lw=1)
        ax.text(when, -0.85, f"token {i + 1}", ha="center", va="top", fontsize=8.5, color=INK)
    for when, words in ((ARRIVAL, "arrival"), (SCHEDULED, "in a step")):
        ax.plot([when, when], [-0.4, -0.75], color=INK, lw=1)
        ax.text(when, -0.85, words, ha="center", va="top", fontsize=8.5, color=GREY)
    span(ax, 0.8, ARRIVAL, first, "time to first token (TTFT)")
    span(ax, 0.8, first, last, "four gaps; their mean is the time per output token (TPOT)")
    span(ax, 1.7, SCHEDULED, last, "inference")
    span(ax, 2.6, ARRIVAL, last, "end to end (e2e)")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
