"""A running softmax over six keys in three tiles: what is held, how it shrinks, what a tile adds; below, the
total as a bar. The last tile is left open.

python articles/figures/09_running.py    # writes 09_running.svg beside this file
"""

from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

TILES = (((1, 4), (2, 8)), ((4, 12), (1, 0)), ((16, 20), (8, 4)))  # (e^score, value) of each key
BLUE, ORANGE, INK, PALE = "#1d4ed8", "#b45309", "#334155", "#eef2ff"
plt.rcParams.update({"svg.hashsalt": "09_running", "font.family": "DejaVu Sans", "font.size": 10})


def box(
    ax: plt.Axes, x: float, y: float, text: str, colour: str, width: float = 2.2, height: float = 1.25
) -> None:
    style = {"boxstyle": "round,pad=0.08", "facecolor": {BLUE: PALE, ORANGE: "#fff7ed"}[colour]}
    ax.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, edgecolor=colour, lw=1.2, **style)
    )
    ax.text(x, y, text, ha="center", va="center", color=INK, fontsize=9.5, linespacing=1.5)


def bar(ax: plt.Axes, x: float, old: Fraction, shrunk: Fraction, added: Fraction) -> None:
    """The total as a height: dashed what it was before this tile, blue what is left, orange what is added."""
    bottom, unit = -3.6, 0.75
    for width, height, base, style in (
        (0.9, old, Fraction(0), {"facecolor": "none", "edgecolor": BLUE, "ls": "--"}),
        (0.7, shrunk, Fraction(0), {"facecolor": BLUE}),
        (0.7, added, shrunk, {"facecolor": ORANGE}),
    ):
        corner = (x - width / 2, bottom + unit * float(base))
        ax.add_patch(Rectangle(corner, width, unit * float(height), **style))
    ax.text(
        x + 0.6, bottom + 0.1, f"total {said(old)} → {said(shrunk)}\n+ {said(added)}", color=INK, fontsize=9
    )


def said(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):g}"


def main() -> None:
    figure, ax = plt.subplots(figsize=(9, 6))
    largest, total, weighted = Fraction(0), Fraction(0), Fraction(0)
    for step, tile in enumerate(TILES):
        x = 4.3 * step
        new = max(largest, *(Fraction(e) for e, _ in tile))
        shrink = largest / new
        terms = [Fraction(e) / new for e, _ in tile]
        adds = sum(terms), sum(term * value for term, (_, value) in zip(terms, tile, strict=True))
        keys = "\n".join(f"e^score {e}, value {value}" for e, value in tile)
        box(ax, x, 2.6, f"tile {step + 1}\n{keys}", ORANGE, width=2.9, height=1.5)
        ax.annotate("", (x, 0.85), (x, 1.75), arrowprops={"arrowstyle": "->", "color": ORANGE})
        left_open = step == len(TILES) - 1  # the article asks for this one
        adding = f"relative to {said(new)}:\n+ {said(adds[0])}   + {said(adds[1])}"
        adding = "relative to ?\n+ ?   + ?" if left_open else adding
        ax.text(x + 0.15, 1.3, adding, va="center", color=ORANGE, fontsize=9)
        if not left_open:
            bar(ax, x, total, total * shrink, adds[0])
        largest, total, weighted = new, total * shrink + adds[0], weighted * shrink + adds[1]
        held = f"maximum  ln {said(largest)}\ntotal  {said(total)}\nweighted  {said(weighted)}"
        box(ax, x, 0, "maximum  ?\ntotal  ?\nweighted  ?" if left_open else held, BLUE)
        if step:
            ax.annotate("", (x - 1.25, 0), (x - 3.05, 0), arrowprops={"arrowstyle": "->", "color": BLUE})
            ax.text(
                x - 2.15,
                0.12,
                f"both · {'?' if left_open else shrink}",
                ha="center",
                va="bottom",
                color=BLUE,
                fontsize=9.5,
            )
    ax.text(8.6, -1.15, "mean = weighted / total = ?", ha="center", weight="bold", color=INK)
    ax.text(-1.5, -1.15, "held between two tiles: three numbers", color=BLUE)
    ax.set_xlim(-1.6, 10.6)
    ax.set_ylim(-3.8, 3.5)
    ax.axis("off")
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
