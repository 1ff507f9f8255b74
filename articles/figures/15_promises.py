"""A full room, the pace at which it empties, and when three who are turned away are told to come back.

python articles/figures/15_promises.py      # writes 15_promises.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

INK, GREY = "#222222", "#666666"
HERE, NEW, AWAY = "#bfdbfe", "#bbf7d0", "#dc2626"
SECONDS = 2.0  # between two that leave


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.6))
    ax.set(xlim=(-0.6, 9.2), ylim=(-2.2, 4.2), xlabel="seconds from now", yticks=[])
    bare(ax, "left")
    for place in range(4):
        y, left = 3 - place, SECONDS * (place + 1)
        ax.barh(y, left, height=0.72, left=0, color=HERE, edgecolor=INK, lw=0.8, align="center")
        words = "one of the four who are in: leaves here"
        ax.text(left - 0.08, y, words if place == 3 else "", ha="right", va="center", fontsize=8.5)
        if place < 3:
            ax.barh(y, 9 - left, height=0.72, left=left, color=NEW, edgecolor=INK, lw=0.8, align="center")
            ax.text(left + 0.1, y, f"the place of {'ABC'[place]}", va="center", fontsize=9, weight="bold")
            ax.annotate(
                "",
                (left, y - 0.4),
                (0, -1.0),
                arrowprops={"arrowstyle": "->", "color": AWAY, "lw": 1.2, "shrinkA": 2, "shrinkB": 0},
            )
    ax.plot(0, -1.0, "o", color=AWAY, ms=6, clip_on=False)
    ax.text(0.1, -1.3, "A, B and C find no room: told 2 s, 4 s and 6 s", color=AWAY, va="top", fontsize=9)
    ax.text(0.1, -1.8, "told 2 s all three, two would find no room again", color=GREY, va="top", fontsize=9)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
