"""A step on two ranks over time: an order, computing and summing by turns, and the choice. Not to scale.

python articles/figures/A_step.py      # writes A_step.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, Rectangle

INK, GREY = "#222222", "#666666"
COLOURS = {"host": "#e5e7eb", "compute": "#93c5fd", "sum": "#fca5a5", "wait": "white"}
# (what is written, kind, from, to), by rank. Rank 1 is a little slower at first: rank 0 waits in the sum.
ROWS = (
    (
        ("schedule", "host", 0.0, 1.6), ("order", "host", 1.6, 2.3), ("embed,\nheads", "compute", 2.3, 3.7),
        ("sum", "sum", 3.7, 4.9), ("MLP", "compute", 4.9, 6.3), ("sum", "sum", 6.3, 7.2),
        ("heads", "compute", 8.2, 9.4), ("sum", "sum", 9.4, 10.3), ("MLP", "compute", 10.3, 11.7),
        ("sum", "sum", 11.7, 12.6), ("logits,\nchoose", "compute", 12.6, 14.2),
        ("outputs", "host", 14.2, 15.4),
    ),
    (
        ("waits for an order", "wait", 0.0, 2.5), ("embed,\nheads", "compute", 2.5, 4.2),
        ("sum", "sum", 4.2, 4.9), ("MLP", "compute", 4.9, 6.3), ("sum", "sum", 6.3, 7.2),
        ("heads", "compute", 8.2, 9.4), ("sum", "sum", 9.4, 10.3), ("MLP", "compute", 10.3, 11.7),
        ("sum", "sum", 11.7, 12.6), ("waits", "wait", 12.6, 15.4),
    ),
)  # fmt: skip


def main() -> None:
    figure, ax = plt.subplots(figsize=(11.4, 2.9))
    ax.set(xlim=(-1.5, 15.6), ylim=(-1.15, 3.4))
    ax.axis("off")
    for rank, row in enumerate(ROWS):
        y = 1.9 - 1.9 * rank
        ax.text(-0.2, y + 0.5, f"rank {rank}", ha="right", va="center", color=INK, fontweight="bold")
        for words, kind, start, end in row:
            edge, style = (GREY, "--") if kind == "wait" else (INK, "-")
            box = Rectangle(
                (start, y), end - start, 1, facecolor=COLOURS[kind], edgecolor=edge, lw=0.8, ls=style
            )
            ax.add_patch(box)
            ax.text((start + end) / 2, y + 0.5, words, ha="center", va="center", color=INK, fontsize=8.5)
        ax.text(7.7, y + 0.5, "…", ha="center", va="center", color=INK, fontsize=14)
    ax.add_patch(FancyArrowPatch((1.95, 1.88), (2.5, 1.02), arrowstyle="-|>", mutation_scale=11, color=INK))
    ax.text(1.85, 1.4, "numbers, by a pipe", ha="right", va="center", color=INK, fontsize=8.5)
    for start, end in ((4.2, 4.9), (6.3, 7.2), (9.4, 10.3), (11.7, 12.6)):
        middle = (start + end) / 2
        ax.add_patch(
            FancyArrowPatch(
                (middle, 1.02), (middle, 1.88), arrowstyle="<|-|>", mutation_scale=9, color="#b91c1c"
            )
        )
    for start, end, words in ((2.3, 7.2, "the first block"), (8.2, 12.6, "the last block")):
        ax.annotate(
            "",
            (start, 3.08),
            (end, 3.08),
            arrowprops={"arrowstyle": "|-|,widthA=0.2,widthB=0.2", "color": GREY},
        )
        ax.text((start + end) / 2, 3.18, words, ha="center", va="bottom", color=GREY, fontsize=9)
    ax.text(
        -1.4, -0.75, color=GREY, fontsize=9,
        s="Time goes to the right; widths are not measured. A sum begins when a rank comes to it, "
        "and ends for all when the last one has come.",
    )  # fmt: skip
    save(figure, __file__)


if __name__ == "__main__":
    main()
