"""A mixed batch in a linear layer: all rows through the weight, then each adapter's rows through its own two.

python articles/figures/18_batch.py      # writes 18_batch.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

INK, GREY = "#222222", "#666666"
POETRY, BUSINESS, BASE = "#c4b5fd", "#fdba74", "#e5e7eb"
ROWS = (BASE, POETRY, POETRY, POETRY, BUSINESS, BASE, POETRY)  # of the step, in the batch's order
GROUPS = ((POETRY, "poetry", (1, 2, 3, 6), 1.35), (BUSINESS, "business", (4,), -1.0))


def stack(ax, x, y, rows, width) -> None:
    """Rows lying one below the other, the first on top; y is the top."""
    for i, colour in enumerate(rows):
        ax.add_patch(Rectangle((x, y - 0.42 * (i + 1)), width, 0.38, facecolor=colour, edgecolor=INK, lw=0.6))


def arrow(ax, start, end) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=GREY, lw=1))


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.4, 4.9))
    ax.set(xlim=(-0.2, 13.4), ylim=(-2.6, 6.4))
    ax.axis("off")
    # 1. x, and the layer's own weight for all rows.
    stack(ax, 0, 5.2, ROWS, 1.6)
    ax.text(0.8, 5.45, "x[T, in]", ha="center", color=INK)
    ax.add_patch(Rectangle((4.2, 3.0), 3.2, 2.2, facecolor="white", edgecolor=INK))
    ax.text(5.8, 4.1, "W\nread once for all rows", ha="center", va="center", color=INK, fontsize=9)
    arrow(ax, (1.75, 4.1), (4.1, 4.1))
    # 2. Each adapter for its own rows, through the narrow middle.
    for colour, name, rows, top in GROUPS:
        middle = top - 0.21 * len(rows)
        stack(ax, 3.0, top, [colour] * len(rows), 1.3)
        ax.add_patch(
            Polygon(
                [(5.0, middle + 0.75), (5.0, middle - 0.75), (5.9, middle - 0.2), (5.9, middle + 0.2)],
                facecolor=colour, edgecolor=INK, lw=0.8,
            )
        )  # fmt: skip
        ax.add_patch(
            Polygon(
                [(6.7, middle + 0.2), (6.7, middle - 0.2), (7.6, middle - 0.75), (7.6, middle + 0.75)],
                facecolor=colour, edgecolor=INK, lw=0.8,
            )
        )  # fmt: skip
        ax.text(5.42, middle, "A", ha="center", va="center", color=INK, fontsize=9)
        ax.text(7.18, middle, "B", ha="center", va="center", color=INK, fontsize=9)
        ax.text(6.3, middle + 0.27, "r wide", ha="center", color=GREY, fontsize=8)
        ax.text(2.85, middle, f"{name}'s\nrows", ha="right", va="center", color=INK, fontsize=9)
        arrow(ax, (4.4, middle), (4.95, middle))
        arrow(ax, (5.92, middle), (6.68, middle))
        arrow(ax, (7.65, middle), (10.1, middle))
        stack(ax, 10.2, top, [colour] * len(rows), 2.2)
    # 3. The sum.
    stack(ax, 10.2, 5.2, ROWS, 2.2)
    ax.text(11.3, 5.45, "y[T, out]", ha="center", color=INK)
    arrow(ax, (7.5, 4.1), (10.1, 4.1))
    ax.text(11.3, 1.72, "+ on the rows they came from", ha="center", color=GREY, fontsize=9)
    ax.text(
        0, -2.4, "grey: the base's rows. Nothing is added to them, and no adapter is read for them.",
        color=GREY, fontsize=9,
    )  # fmt: skip
    save(figure, __file__)


if __name__ == "__main__":
    main()
