"""A block on two ranks: whose weights are whose, and where the sums stand.

python articles/figures/A_cut.py      # writes A_cut.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, GREY, WHOLE = "#222222", "#666666", "#e5e7eb"
RANKS = ("#93c5fd", "#fdba74")
TOP = (4.1, 1.0)  # the middle of each rank's row


def matrix(ax, x: float, y: float, size: tuple[float, float], rank: int, along: str) -> None:
    """A weight [out, in], drawn `size` wide and high around (x, y); this rank has the half along `along`."""
    width, height = size
    left, bottom = x - width / 2, y - height / 2
    ax.add_patch(Rectangle((left, bottom), width, height, facecolor="white", edgecolor=GREY, lw=0.7))
    if along == "rows":
        part = Rectangle((left, bottom + (0.5 - rank / 2) * height), width, height / 2)
    else:
        part = Rectangle((left + rank * width / 2, bottom), width / 2, height)
    part.set(facecolor=RANKS[rank], edgecolor=INK, lw=0.8)
    ax.add_patch(part)


def arrow(ax, start, end) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=GREY, lw=1))


def main() -> None:
    figure, ax = plt.subplots(figsize=(11.4, 5.0))
    ax.set(xlim=(-0.6, 16.9), ylim=(-1.35, 6.3))
    ax.axis("off")
    for x, words in (
        (2.5, "qkv\nby outputs:\nwhole heads"), (6.3, "proj\nby inputs"),
        (10.4, "up\nby outputs"), (13.7, "down\nby inputs"),
    ):  # fmt: skip
        ax.text(x, 5.35, words, ha="center", va="bottom", color=INK, fontsize=9.5)
    for rank, y in enumerate(TOP):
        ax.text(-0.45, y + 1.0, f"rank {rank}", color=INK, fontsize=11, fontweight="bold")
        ax.text(0.15, y, "x", ha="center", va="center", color=INK)
        arrow(ax, (0.35, y), (1.5, y))
        for i, name in enumerate("qkv"):
            matrix(ax, 2.5, y + 0.7 * (1 - i), (1.2, 0.62), rank, "rows")
            ax.text(1.72, y + 0.7 * (1 - i), name, ha="center", va="center", color=INK, fontsize=8.5)
        arrow(ax, (3.2, y), (3.65, y))
        heads = FancyBboxPatch((3.75, y - 0.5), 1.35, 1.0, boxstyle="round,pad=0.05")
        heads.set(facecolor=RANKS[rank], edgecolor=INK, lw=0.8)
        ax.add_patch(heads)
        ax.text(4.42, y, "its heads,\nits keys", ha="center", va="center", color=INK, fontsize=8.5)
        arrow(ax, (5.2, y), (5.65, y))
        matrix(ax, 6.3, y, (1.2, 1.2), rank, "columns")
        arrow(ax, (6.95, y), (7.75, 2.55 + (0.45 if rank == 0 else -0.45)))
        arrow(ax, (8.45, 2.55 + (0.45 if rank == 0 else -0.45)), (9.7, y))
        matrix(ax, 10.4, y, (1.2, 1.9), rank, "rows")
        arrow(ax, (11.05, y), (11.42, y))
        ax.text(11.8, y, "curve", ha="center", va="center", color=INK, fontsize=8.5)
        arrow(ax, (12.2, y), (12.7, y))
        matrix(ax, 13.7, y, (1.9, 1.2), rank, "columns")
        arrow(ax, (14.7, y), (15.4, 2.55 + (0.45 if rank == 0 else -0.45)))
    for x, words in ((8.1, "add to x,\nnorm"), (15.8, "add to x")):
        ax.add_patch(plt.Circle((x, 2.55), 0.55, facecolor=WHOLE, edgecolor=INK, lw=1))
        ax.text(x, 2.55, "sum", ha="center", va="center", color=INK, fontsize=10)
        ax.text(x, 1.75, words, ha="center", va="top", color=GREY, fontsize=8.5)
    ax.text(
        -0.45, -1.1,
        "Coloured: what the rank has of the weight, drawn as [out, in]. White: what the other rank has.\n"
        "Grey: all ranks wait for one another, and go on with the same numbers.",
        color=GREY, fontsize=9,
    )  # fmt: skip
    save(figure, __file__)


if __name__ == "__main__":
    main()
