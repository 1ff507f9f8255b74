"""One tile of the decode kernel: queries in 16 rows, keys of 64 tokens from four blocks, scores, both masks.

python articles/figures/13_tile.py    # writes 13_tile.svg beside this file
"""

from drawing import plt, save
from matplotlib.patches import Rectangle

ROWS, WIDTH, P, TABLE = 16, 10, 16, (5, 2, 7, 3)  # WIDTH: as many columns of Dh as are drawn
TOKENS, LENGTH = P * len(TABLE), 55
QUERY, EMPTY, INK, GREY, LINE = "#0f766e", "#f1f5f9", "#1f2937", "#64748b", "#94a3b8"
BLOCKS = ("#bae6fd", "#fed7aa", "#bbf7d0", "#f5d0fe")
QUERIES_LEFT, LEFT, KEYS = 4, 22, ROWS + 3  # where queries and keys begin, and how high the keys stand


def area(ax: plt.Axes, x: float, y: float, width: float, height: float, colour: str, hatch: str = "") -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=LINE, lw=0.6, hatch=hatch))


def main() -> None:
    figure, ax = plt.subplots(figsize=(11.4, 4.7))

    def say(x: float, y: float, words: str, ha: str = "center", colour: str = INK) -> None:
        ax.text(x, y, words, ha=ha, va="center", color=colour, fontsize=9)

    area(ax, QUERIES_LEFT, 0, WIDTH, ROWS - 1, EMPTY)
    area(ax, QUERIES_LEFT, ROWS - 1, WIDTH, 1, QUERY)
    area(ax, LEFT, 0, LENGTH, ROWS - 1, EMPTY)
    for number, (block, colour) in enumerate(zip(TABLE, BLOCKS, strict=True)):
        first, num_tokens = number * P, min(P, LENGTH - number * P)
        for token in range(first, first + num_tokens):
            area(ax, LEFT + token, KEYS, 1, WIDTH, colour)
        area(ax, LEFT + first, ROWS - 1, num_tokens, 1, colour)
        say(LEFT + first + P / 2, KEYS + WIDTH + 1.3, f"table[{number}] = {block}: block {block}")
    area(ax, LEFT + LENGTH, KEYS, TOKENS - LENGTH, WIDTH, "white", "///")
    area(ax, LEFT + LENGTH, 0, TOKENS - LENGTH, ROWS, "white", "///")
    middle, right = QUERIES_LEFT + WIDTH / 2, LEFT + TOKENS + 1
    say(middle, ROWS + 2.6, "queries [16, Dh]:\none query head,\n15 rows of zeros")
    say(LEFT - 1, KEYS + WIDTH / 2, "kᵀ [Dh, 64]", "right")
    say(LEFT - 1, ROWS / 2, "scores\n[16, 64]", "right")
    say(
        right,
        KEYS + WIDTH / 2,
        f"tokens {LENGTH} to {TOKENS - 1}\nare not there:\nnot loaded, read as 0",
        "left",
    )
    say(right, ROWS / 2, "not scored: −∞,\nsince e⁰ = 1\nwould be a weight", "left")
    say(LEFT + LENGTH / 2, ROWS / 2 - 1, "rows that no query head fills: computed, never stored", colour=GREY)
    say(LEFT, -1.6, f"tokens 0 to {TOKENS - 1}, {P} to a block, each block anywhere in memory", "left", GREY)
    ax.set(xlim=(3, right + 15), ylim=(-2.6, KEYS + WIDTH + 2.4))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
