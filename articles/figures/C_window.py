"""A block table behind a sliding window, as the sequence grows: which pages are held, read, given back.

python articles/figures/C_window.py    # asks PagedCache, and writes C_window.svg beside this file
"""

from types import SimpleNamespace

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Rectangle

from engine.attention.extras import first_visible
from engine.cache.paged import PagedCache

P, WINDOW, BLOCKS, MOST = 4, 6, 8, 20
COUNTS = (4, 8, 9, 12, 13, 17)  # tokens computed
CELL, GAP = 0.62, 0.22
HELD, SEEN, GONE, FREE = "#bfdbfe", "#fdba74", "#e2e8f0", "#f8fafc"
INK, GREY = "#1f2937", "#64748b"


def left(block: int) -> float:
    """Where a group of P cells begins."""
    return block * (P * CELL + GAP)


def main() -> None:
    cache = PagedCache(num_blocks=BLOCKS, block_size=P, window=WINDOW)
    seq = SimpleNamespace(
        id="a", token_ids=list(range(MOST)), num_computed_tokens=0, parent=None, adapter=None,
        cache_salt=None, wants_every_row=False, error=None,
    )  # fmt: skip
    cache.admit(seq)
    figure, ax = plt.subplots(figsize=(11.4, 5.3))
    for row, count in enumerate(COUNTS):
        cache.reserve(seq, count)
        cache.commit(seq, count)
        allocation = cache.allocations["a"]
        gone = allocation.num_blocks_given_back
        y = -0.95 * row
        ax.text(-0.3, y + 0.3, f"{count} tokens computed", ha="right", va="center", color=INK)
        for position in range(MOST):
            x = left(position // P) + position % P * CELL
            is_there = position < count
            is_seen = first_visible(count, WINDOW) <= position < count
            colour = FREE if not is_there else GONE if position // P < gone else SEEN if is_seen else HELD
            ax.add_patch(Rectangle((x, y), CELL, 0.6, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
            if is_there:
                pale = GREY if position // P < gone else INK
                ax.text(
                    x + CELL / 2, y + 0.3, str(position), ha="center", va="center", color=pale, fontsize=8.5
                )
            if position == count:
                ax.add_patch(Rectangle((x, y), CELL, 0.6, facecolor="none", edgecolor="#b91c1c", lw=1.8))
        blocks = len(allocation.held)
        held = f"holds {blocks} block{'s' if blocks > 1 else ''}"
        ax.text(left(MOST // P) + 0.1, y + 0.3, held, va="center", color=GREY)
    for block in range(MOST // P):
        ax.text(left(block) + P * CELL / 2, 0.85, f"table[{block}]", ha="center", color=GREY)
    y = -0.95 * len(COUNTS) + 0.1
    legend = (
        (SEEN, "the next token's query sees it"),
        (HELD, "held, and seen no more"),
        (GONE, "given back"),
    )
    for x, (colour, text) in zip((0, 5.2, 9.2), legend, strict=True):
        ax.add_patch(Rectangle((x, y), 0.4, 0.4, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
        ax.text(x + 0.55, y + 0.2, text, va="center", color=GREY, fontsize=9)
    ax.add_patch(Rectangle((11.6, y), 0.4, 0.4, facecolor="none", edgecolor="#b91c1c", lw=1.8))
    ax.text(12.15, y + 0.2, "the next token", va="center", color=GREY, fontsize=9)
    ax.set(xlim=(-3.2, left(MOST // P) + 2.2), ylim=(y - 0.2, 1.3))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
