"""Two sequences, their block tables, and where their tokens lie: Part 12's worked example.

python articles/figures/12_table.py    # writes 12_table.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

P, BLOCKS = 4, 8
TABLES = {"a": ([5, 2, 7], 9, "#fdba74"), "b": ([0, 4], 6, "#93c5fd")}
CELL, GAP = 0.62, 0.22
FREE, INK, GREY = "#f8fafc", "#1f2937", "#64748b"
plt.rcParams.update({"svg.hashsalt": "12_table", "font.family": "DejaVu Sans", "font.size": 9.5})


def cell(ax: plt.Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), CELL, 0.6, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
    ax.text(x + CELL / 2, y + 0.3, text, ha="center", va="center", color=INK)


def left(index: int) -> float:
    """Where a group of P cells begins."""
    return index * (P * CELL + GAP)


def main() -> None:
    figure, ax = plt.subplots(figsize=(11.4, 4.9))
    holds = {}  # (block, place) -> text, colour
    for row, (name, (table, length, colour)) in enumerate(TABLES.items()):
        x0, y = left(0 if row == 0 else 4), 4.1
        ax.text(x0, y + 1.15, f"sequence {name}: {length} tokens", weight="bold", color=INK)
        for i in range(length):
            cell(ax, x0 + left(i // P) + i % P * CELL, y, f"{name}{i}", colour)
            holds[table[i // P], i % P] = f"{name}{i}", colour
        for j, block in enumerate(table):
            middle = x0 + left(j) + P * CELL / 2
            ax.text(middle, y + 0.78, f"table[{j}] = {block}", ha="center", color=GREY)
            end = left(block) + P * CELL / 2
            ax.add_patch(
                FancyArrowPatch(
                    (middle, y - 0.05), (end, 1.35), arrowstyle="-|>", mutation_scale=10, color=colour, lw=1.6
                )
            )
    for block in range(BLOCKS):
        for place in range(P):
            text, colour = holds.get((block, place), ("", FREE))
            cell(ax, left(block) + place * CELL, 0.7, text, colour)
            number = block * P + place
            ax.text(
                left(block) + place * CELL + CELL / 2, 0.45, str(number), ha="center", va="center",
                color=GREY, fontsize=8,
            )  # fmt: skip
        ax.text(left(block) + P * CELL / 2, 0.02, f"block {block}", ha="center", color=INK)
    ax.text(
        0,
        -0.55,
        "the memory: 8 blocks of 4 places; below each place its number, block · 4 + place",
        color=GREY,
    )
    x, y = left(2) + 2 * CELL, 0.7
    ax.add_patch(Rectangle((x, y), CELL, 0.6, facecolor="none", edgecolor="#b91c1c", lw=2))
    ax.add_patch(Rectangle((left(1) + 2 * CELL, 4.1), CELL, 0.6, facecolor="none", edgecolor="#b91c1c", lw=2))
    ax.set(xlim=(-0.2, left(BLOCKS)), ylim=(-0.8, 5.7))
    ax.axis("off")
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
