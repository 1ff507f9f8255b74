"""The loop of Part 2 as a picture: ids go round, text goes out.

python articles/figures/02_loop.py      # writes 02_loop.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, IDS, MODEL, TEXT, END = "#222222", "#dbeafe", "#fde68a", "#d1fae5", "#fecaca"


def box(ax, x: float, y: float, what: str, example: str, colour: str, width: float = 1.9) -> None:
    """A rounded box centred on (x, y): what it is, and below it an example."""
    corner = (x - width / 2, y - 0.42)
    ax.add_patch(
        FancyBboxPatch(corner, width, 0.84, boxstyle="round,pad=0.02,rounding_size=0.1", fc=colour, ec=INK)
    )
    ax.text(x, y + 0.16, what, ha="center", va="center", weight="bold")
    ax.text(x, y - 0.18, example, ha="center", va="center", family="DejaVu Sans Mono", fontsize=8.5)


def arrow(ax, start, end, label: str = "", bend: float = 0.0, at=None) -> None:
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, lw=1.2, color=INK, connectionstyle=style
        )
    )
    if label:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12)
        ax.text(x, y, label, ha="center", fontsize=8.5, color="#555555")


def main() -> None:
    figure, ax = plt.subplots(figsize=(11, 4.4))
    ax.set(xlim=(-1.2, 10.6), ylim=(-1.35, 3.5))
    ax.axis("off")

    # Round: ids, logits, one id, and back.
    box(ax, 0, 2, "token ids", "418 436 261 388", IDS)
    box(ax, 3.1, 2, "forward", "[T] → [V]", MODEL)
    box(ax, 6.2, 2, "choose", "argmax", MODEL)
    box(ax, 9.3, 2, "one id", "14", IDS)
    for x in (0, 3.1, 6.2):
        arrow(ax, (x + 1.0, 2), (x + 2.1, 2), "logits" if x == 3.1 else "")
    arrow(ax, (9.3, 2.47), (0, 2.47), "append, and again", bend=0.12, at=(4.65, 3.17))

    # Out: bytes, characters, safe text, and the question whether this was the end.
    box(ax, 9.3, 0, "Detokenizer", "half an emoji waits", TEXT, width=2.2)
    box(ax, 6.2, 0, "the end?", "eos · stop · length", END)
    box(ax, 3.1, 0, "visible", "half a stop waits", TEXT)
    box(ax, 0, 0, "reader", "Once upon a time,", TEXT)
    arrow(ax, (9.3, 1.53), (9.3, 0.47), "bytes", at=(9.68, 0.95))
    arrow(ax, (8.17, 0), (7.2, 0))
    arrow(ax, (5.2, 0), (4.1, 0))
    arrow(ax, (2.1, 0), (1.0, 0))
    frame = FancyBboxPatch(
        (1.95, -0.62), 8.6, 1.24, boxstyle="round,pad=0.04", fc="none", ec=INK, ls="--", lw=0.8
    )
    ax.add_patch(frame)
    for x, y, where in [
        (4.65, 1.35, "engine/decoding/greedy.py"),
        (6.2, -0.98, "engine/decoding/stopping.py: GrowingOutput"),
    ]:
        ax.text(x, y, where, ha="center", family="DejaVu Sans Mono", fontsize=8.5, color="#555555")
    save(figure, __file__)


if __name__ == "__main__":
    main()
