"""Two slots over time: what lies in them while a name is swapped, and a request that waits for one.

python articles/figures/18_keys.py      # writes 18_keys.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

INK, GREY = "#222222", "#666666"
FIRST, SECOND, THIRD = "#c4b5fd", "#fdba74", "#86efac"
# row, start, end, colour, words
BARS = (
    (4, 2, 8, FIRST, "in slot 0: poetry@1"),
    (4, 8, 12, SECOND, "letters@2"),
    (3, 6, 11, THIRD, "in slot 1: poetry@3"),
    (2, 2, 8, FIRST, "request A: poetry@1"),
    (1, 6, 11, THIRD, "request B: poetry@3"),
    (0, 8, 12, SECOND, "request C: letters@2"),
)
HATCHED = ((3, 11, 12), (0, 7, 8))  # row, start, end: there and not needed; waits
EVENTS = (
    (1, "load\npoetry"),
    (3.2, "load\nletters"),
    (5, "load poetry,\nin place"),
    (7, "C is\nqueued"),
)


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.2, 4.1))
    for row, start, end, colour, words in BARS:
        ax.barh(row, end - start, left=start, height=0.62, color=colour, edgecolor=INK, lw=0.8)
        ax.text((start + end) / 2, row, words, ha="center", va="center", color=INK, fontsize=9)
    for at, words in EVENTS:
        ax.plot([at, at], [-0.5, 4.6], ":", color=GREY, lw=1, zorder=0)
        ax.text(at, 4.7, words, ha="center", va="bottom", color=INK, fontsize=9)
    for row, start, end in HATCHED:
        ax.barh(
            row,
            end - start,
            left=start,
            height=0.62,
            color="white",
            edgecolor=GREY,
            lw=0.8,
            ls="--",
            hatch="//",
        )
    ax.set(xlim=(0, 12), ylim=(-0.6, 5.6), xlabel="seconds")
    ax.set_yticks(range(5), ["", "", "", "slot 1", "slot 0"])
    bare(ax, "left")
    ax.tick_params(axis="y", length=0)
    save(figure, __file__)


if __name__ == "__main__":
    main()
