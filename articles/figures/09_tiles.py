"""Which tiles of scores are computed, which cross the diagonal, which never exist; without and with a past.

python articles/figures/09_tiles.py    # writes 09_tiles.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

TILE = 4
CASES = (("16 queries, 16 keys", 16, 16), ("the last 8 queries of 16 tokens", 8, 16))
WHOLE, DIAGONAL, HIDDEN, NEVER, INK = "#1d4ed8", "#b45309", "#fde7d3", "#f1f5f9", "#334155"
plt.rcParams.update({"svg.hashsalt": "09_tiles", "font.family": "DejaVu Sans", "font.size": 10})


def draw(ax: plt.Axes, name: str, queries: int, keys: int) -> None:
    past = keys - queries
    counts = {WHOLE: 0, DIAGONAL: 0, NEVER: 0}
    for first in range(0, queries, TILE):
        for start in range(0, keys, TILE):
            if start > past + first + TILE - 1:
                kind = NEVER
            elif start + TILE - 1 > past + first:
                kind = DIAGONAL
            else:
                kind = WHOLE
            counts[kind] += 1
            for i in range(first, first + TILE):
                for j in range(start, start + TILE):
                    colour = HIDDEN if kind == DIAGONAL and j > past + i else kind
                    ax.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", lw=0.5))
            ax.add_patch(Rectangle((start, first), TILE, TILE, fill=False, edgecolor="white", lw=3))
    ax.set_xlim(0, keys)
    ax.set_ylim(queries, 0)
    ax.set_aspect("equal")
    ax.set_xticks(range(0, keys + 1, TILE))
    ax.set_yticks(range(0, queries + 1, TILE), [str(past + i) for i in range(0, queries + 1, TILE)])
    ax.set(xlabel="key", ylabel="query, by its position")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    computed = counts[WHOLE] + counts[DIAGONAL]
    ax.set_title(
        f"{name}\n{computed} of {sum(counts.values())} tiles", loc="left", weight="bold", fontsize=10
    )


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for ax, case in zip(axes, CASES, strict=True):
        draw(ax, *case)
    labels = {
        WHOLE: "every query sees every key",
        DIAGONAL: "crosses the diagonal: the future (pale) is hidden",
        NEVER: "all future: never computed",
    }
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in labels]
    figure.legend(handles, labels.values(), loc="outside lower center", ncols=3, frameon=False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
