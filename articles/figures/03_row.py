"""What one decode step computes of the attention triangle, and where it finds the rest.

python articles/figures/03_row.py    # writes 03_row.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

TOKENS = ["Once", "upon", "a", "time", ",", "there"]
OLD, NEW, EDGE = "#dbe7f0", "#b45309", "#8aa0b0"
plt.rcParams.update({"svg.hashsalt": "03_row", "font.family": "DejaVu Sans", "font.size": 10})


def square(ax: plt.Axes, x: float, y: float, colour: str, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), 0.92, 0.92, facecolor=colour, edgecolor=EDGE, lw=0.6))
    ax.text(
        x + 0.46,
        y + 0.46,
        text,
        ha="center",
        va="center",
        fontsize=8.5,
        color="white" if colour == NEW else "#334155",
    )


def triangle(ax: plt.Axes, left: float, title: str, recomputed: bool) -> None:
    """Rows are queries, columns keys; the last row is the new token's."""
    last = len(TOKENS) - 1
    for row in range(len(TOKENS)):
        for column in range(row + 1):
            if row == last or recomputed:
                square(ax, left + column, last - row, NEW)
            else:
                ax.add_patch(
                    Rectangle(
                        (left + column, last - row), 0.92, 0.92, fill=False, edgecolor="#cbd5e1", ls=":"
                    )
                )
    for column, token in enumerate(TOKENS):
        ax.text(left + column + 0.46, -0.2, token, ha="center", va="top", rotation=35, fontsize=9)
    ax.text(left, len(TOKENS) + 0.35, title, weight="bold")


def main() -> None:
    figure, ax = plt.subplots(figsize=(8.6, 5.2))
    triangle(ax, 0, "without a cache: every row, again", True)
    triangle(ax, 9, "with a cache: the new row", False)
    ax.text(-0.3, 3, "queries", rotation=90, ha="center", va="center")
    ax.text(-0.3, 0.46, "new", rotation=90, ha="center", va="center", color=NEW, weight="bold")
    for name, y in (("K", -2.5), ("V", -3.6)):
        ax.text(8.75, y + 0.46, name, ha="right", va="center", weight="bold")
        for column in range(len(TOKENS) + 2):
            last = len(TOKENS) - 1
            colour = OLD if column < last else NEW if column == last else "white"
            square(
                ax, 9 + column, y, colour, "read" if column < last else "write" if column == last else "free"
            )
    ax.text(0, -2.05, "The buffer of one layer, allocated once:", va="center")
    ax.text(0, -2.75, "old keys and values are read,", va="center")
    ax.text(0, -3.45, "the new token's are written behind them.", va="center")
    ax.set(xlim=(-0.8, 17.2), ylim=(-3.8, 7), aspect="equal")
    ax.axis("off")
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
