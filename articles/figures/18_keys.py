"""Two slots over time: what lies in them while a name is loaded, swapped and unloaded.

python articles/figures/18_keys.py      # writes 18_keys.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

INK, GREY = "#222222", "#666666"
FIRST, SECOND, THIRD = "#c4b5fd", "#fdba74", "#86efac"
# row, start, end, colour, words
BARS = (
    (3, 1, 8, FIRST, "in slot 0: poetry@1"),
    (2, 5, 12, SECOND, "in slot 1: poetry@2"),
    (3, 10, 12, THIRD, "letters@3"),
    (1, 2, 8, FIRST, "request A: poetry@1"),
    (0, 6, 11, SECOND, "request B: poetry@2"),
)
EVENTS = (
    (1, "load\npoetry"),
    (5, "load poetry,\nin place"),
    (7, "load letters:\nno free slot"),
    (10, "load\nletters"),
)


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.2, 3.6))
    for row, start, end, colour, words in BARS:
        ax.barh(row, end - start, left=start, height=0.62, color=colour, edgecolor=INK, lw=0.8)
        ax.text((start + end) / 2, row, words, ha="center", va="center", color=INK, fontsize=9)
    for at, words in EVENTS:
        ax.plot([at, at], [-0.5, 3.6], ":", color=GREY, lw=1, zorder=0)
        ax.text(at, 3.7, words, ha="center", va="bottom", color=INK, fontsize=9)
    ax.barh(3, 2, left=8, height=0.62, color="white", edgecolor=GREY, lw=0.8, ls="--", hatch="//")
    ax.set(xlim=(0, 12), ylim=(-0.6, 4.6), xlabel="seconds")
    ax.set_yticks([0, 1, 2, 3], ["", "", "slot 1", "slot 0"])
    bare(ax, "left")
    ax.tick_params(axis="y", length=0)
    save(figure, __file__)


if __name__ == "__main__":
    main()
