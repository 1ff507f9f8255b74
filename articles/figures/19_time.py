"""Twelve seconds of a device: two steps that overlap, a pause, and who has each second.

python articles/figures/19_time.py      # writes 19_time.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

INK, GREY = "#222222", "#666666"
COLOURS = {"idle": "#e5e7eb", "step 1": "#93c5fd", "step 2": "#fdba74", "step 3": "#86efac"}
# name, launched, landed, row
STEPS = (("step 1", 2, 5, 2.1), ("step 2", 4, 7, 3.0), ("step 3", 8, 10, 2.1))
GIVEN = (("idle", 0, 1), ("step 1", 1, 5), ("step 2", 5, 7), ("step 3", 7, 10), ("idle", 10, 12))
EVENTS = ((1, "A arrives"), (10, "A has its answer,\nand leaves"))


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.2, 3.5))
    for name, start, end, row in STEPS:
        ax.barh(row, end - start, left=start, height=0.62, color=COLOURS[name], edgecolor=INK, lw=0.8)
        ax.text((start + end) / 2, row, name, ha="center", va="center", color=INK)
    for name, start, end in GIVEN:
        ax.barh(0.7, end - start, left=start, height=0.75, color=COLOURS[name], edgecolor="white", lw=1.5)
        words = f"{name}: {end - start} s"
        ax.text((start + end) / 2, 0.7, words, ha="center", va="center", color=INK, fontsize=9)
    for at in (1, 5, 7, 10):
        ax.plot([at, at], [0.2, 3.5], ":", color=GREY, lw=1)
    for at, words in EVENTS:
        ax.annotate(words, (at, 3.55), ha="center", va="bottom", color=INK, fontsize=9)
    ax.text(
        -0.15,
        2.55,
        "on the device,\nfrom launch\nto landing",
        ha="right",
        va="center",
        color=GREY,
        fontsize=9,
    )
    ax.text(-0.15, 0.7, "given to", ha="right", va="center", color=GREY, fontsize=9)
    ax.set(xlim=(0, 12), ylim=(0.1, 4.3), yticks=[], xlabel="seconds")
    ax.set_xticks(range(13))
    bare(ax, "left")
    save(figure, __file__)


if __name__ == "__main__":
    main()
