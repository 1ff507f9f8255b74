"""A query and a key of two numbers, turned by 40° a position: the angle between them tells their distance.

python articles/figures/20_turn.py      # writes 20_turn.svg beside this file
"""

from math import cos, radians, sin

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Arc, Circle

GREY, QUERY, KEY = "#8a8a8a", "#2a6fbb", "#d9720f"
STEP = 40  # degrees a position
PLACES = ((1, 0), (2, 1), (7, 6), (3, 0))  # of the query, of the key


def arrow(ax, degrees: float, colour: str, words: str) -> None:
    x, y = cos(radians(degrees)), sin(radians(degrees))
    ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2})
    ax.text(1.24 * x, 1.24 * y, words, color=colour, ha="center", va="center", fontsize=10)


def main() -> None:
    figure, axes = plt.subplots(1, len(PLACES), figsize=(9.6, 2.9))
    for ax, (query, key) in zip(axes, PLACES, strict=True):
        ax.set(xlim=(-1.5, 1.5), ylim=(-1.65, 1.5), aspect="equal")
        ax.axis("off")
        ax.add_patch(Circle((0, 0), 1, fill=False, edgecolor=GREY, lw=0.6))
        first, last = sorted((STEP * key, STEP * query))
        ax.add_patch(Arc((0, 0), 0.8, 0.8, theta1=first, theta2=last, color=GREY, lw=1.2))
        arrow(ax, STEP * query, QUERY, "q")
        arrow(ax, STEP * key, KEY, "k")
        words = f"query at {query}, key at {key}:\n{STEP * (query - key)}° apart"
        ax.text(0, -1.62, words, ha="center", va="center", color=GREY, fontsize=9)
    save(figure, __file__)


if __name__ == "__main__":
    main()
