"""Five prompts as a padded rectangle, and packed on one token axis with its positions and query_start.

python articles/figures/07_packing.py    # writes 07_packing.svg beside this file
"""

from itertools import accumulate, pairwise

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Polygon, Rectangle

LENGTHS = (9, 3, 7, 2, 5)
COLOURS = ("#1d4ed8", "#b45309", "#047857", "#7c3aed", "#be123c")
FILLER, EDGE, INK = "#e5e7eb", "white", "#334155"


def cell(ax: plt.Axes, x: float, y: float, colour: str, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=EDGE, lw=1.2))
    ink = INK if colour == FILLER else "white"
    ax.text(x + 0.5, y + 0.47, text, ha="center", va="center", fontsize=8.5, color=ink)


def main() -> None:
    figure, ax = plt.subplots(figsize=(9, 5.6))
    longest, starts = max(LENGTHS), (0, *accumulate(LENGTHS))
    total, rectangle = starts[-1], max(LENGTHS) * len(LENGTHS)

    # 1. The rectangle.
    ax.text(0, 6.9, f"padded: {rectangle} tokens computed, {rectangle - total} in vain", weight="bold")
    for s, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        ax.text(-0.4, 5.47 - s, "ABCDE"[s], ha="right", va="center", weight="bold", color=colour)
        for i in range(longest):
            cell(ax, i, 5 - s, colour if i < length else FILLER, str(i) if i < length else "")

    # 2. Who sees whom: a triangle each.
    ax.text(15, 6.9, "packed: a triangle each", weight="bold")
    scale, left, top = 6.2 / total, 15, 6.4
    for (a, b), colour in zip(pairwise(starts), COLOURS, strict=True):
        corners = [(a, a), (a, b), (b, b)]
        points = [(left + x * scale, top - y * scale) for x, y in corners]
        ax.add_patch(Polygon(points, facecolor=colour, edgecolor=EDGE))
    frame = Rectangle((left, top - 6.2), 6.2, 6.2, fill=False, edgecolor=INK, lw=0.8)
    ax.add_patch(frame)
    ax.text(left + 3.1, top - 6.45, "key", ha="center", va="top")
    ax.text(left - 0.25, top - 3.1, "query", ha="right", va="center", rotation=90)

    # 3. The flat axis.
    ax.text(0, -1.2, f"packed: {total} tokens computed, none in vain", weight="bold")
    for (a, b), colour in zip(pairwise(starts), COLOURS, strict=True):
        for i in range(a, b):
            cell(ax, i, -2.6, colour, str(i - a))
    ax.text(total + 0.4, -2.13, "positions", va="center", color=INK)
    for start in starts:
        ax.plot([start, start], [-2.6, -3.1], color=INK, lw=1)
        ax.text(start, -3.2, str(start), ha="center", va="top", color=INK)
    ax.text(total + 1, -3.47, "query_start", va="center", color=INK)
    ax.set(xlim=(-1.2, total + 4.6), ylim=(-4, 7.6), aspect="equal")
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
