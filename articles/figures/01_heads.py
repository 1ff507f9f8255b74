"""Two heads side by side: the query of ` ball` goes down through keys, weights and values in each.

python articles/figures/01_heads.py    # writes 01_heads.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, Rectangle

TOKENS = ["·a", "·red", "·ball"]
HEADS = (  # (query of ·ball, keys, values): the first is the article's example
    ([1, 2], [[1, 0], [0, 1], [1, 1]], [[4, 0], [0, 4], [2, 2]]),
    ([0, 3], [[0, 0], [1, 1], [0, 0]], [[1, 1], [6, 2], [0, 2]]),
)
WIDTH, GAP = 1.72, 1.4
COLOURS, INK, EDGE = ("#fdba74", "#93c5fd"), "#1f2937", "#94a3b8"


def attend(q: list, keys: list, values: list) -> tuple[list[float], list[float]]:
    """The weights of one query over its keys, and the mean of the values."""
    powers = [2.718281828 ** (sum(a * b for a, b in zip(q, k, strict=True)) / 2**0.5) for k in keys]
    weights = [power / sum(powers) for power in powers]
    return weights, [sum(w * v[i] for w, v in zip(weights, values, strict=True)) for i in (0, 1)]


def cell(ax: plt.Axes, x: float, y: float, text: str, colour: str = "white", strength: float = 1.0) -> None:
    ax.add_patch(Rectangle((x, y), WIDTH - 0.1, 0.7, facecolor=colour, alpha=strength, edgecolor="none"))
    ax.add_patch(Rectangle((x, y), WIDTH - 0.1, 0.7, facecolor="none", edgecolor=EDGE, lw=0.8))
    ax.text(x + (WIDTH - 0.1) / 2, y + 0.35, text, ha="center", va="center", color=INK)


def down(ax: plt.Axes, x: float, start: float, to: float, end: float, weight: float = 0.5) -> None:
    ax.add_patch(
        FancyArrowPatch(
            (x, start), (to, end), arrowstyle="-|>", mutation_scale=9, color="#64748b", lw=0.5 + 3 * weight
        )
    )


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 4.6))
    middle, outputs = (WIDTH - 0.1) / 2, []
    for number, ((q, keys, values), colour) in enumerate(zip(HEADS, COLOURS, strict=True)):
        left = number * (3 * WIDTH + GAP)
        centre = left + WIDTH
        weights, out = attend(q, keys, values)
        ax.text(centre + middle, 7.75, f"head {number + 1}", ha="center", weight="bold")
        cell(ax, centre, 6.7, f"q = ({q[0]}, {q[1]})", colour)
        for place, token in enumerate(TOKENS):
            x = left + place * WIDTH
            ax.text(x + middle, 5.85, token, ha="center", color="#64748b")
            cell(ax, x, 5.0, "({}, {})".format(*keys[place]))
            cell(ax, x, 3.5, f"{weights[place]:.2f}", colour, weights[place])
            cell(ax, x, 2.0, "({}, {})".format(*values[place]))
            down(ax, centre + middle, 6.7, x + middle, 6.2, 0.1)
            down(ax, x + middle, 5.0, x + middle, 4.2, 0.1)
            down(ax, x + middle, 3.5, x + middle, 2.7, weights[place])
            down(ax, x + middle, 2.0, centre + middle, 1.2, weights[place])
        cell(ax, centre, 0.5, f"({out[0]:.2f}, {out[1]:.2f})", colour)
        outputs += out
        down(ax, centre + middle, 0.5, 3 * WIDTH + GAP / 2 + (2 * number - 1) * 1.2, -0.6, 0.2)
    for y, name in ((6.7, "query of ·ball"), (5.0, "keys"), (3.5, "weights"), (2.0, "values"), (0.5, "mean")):
        ax.text(-0.3, y + 0.35, name, ha="right", va="center")
    whole = ", ".join(f"{x:.2f}" for x in outputs)
    ax.text(-0.3, -0.95, "side by side", ha="right", va="center")
    ax.text(
        3 * WIDTH + GAP / 2, -0.95, f"({whole})   then one linear layer", ha="center", va="center", color=INK
    )
    ax.set(xlim=(-2.6, 6 * WIDTH + GAP + 0.2), ylim=(-1.4, 8.2))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
