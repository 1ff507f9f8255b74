"""One decode step of Part 3's worked example: what is computed, what is read from the cache, what is written.

python articles/figures/03_step.py    # writes 03_step.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, Rectangle

TOKENS = ["0: a", "1: red", "2: ball", "3", "4"]
Q = [1, 2]  # of the new token, the third
K = [[1, 0], [0, 1], [1, 1]]
V = [[4, 0], [0, 4], [2, 2]]
PLACES, LEFT, WIDTH = 5, 2.6, 1.75
OLD, NEW, FREE, INK = "#dbe7f0", "#fdba74", "white", "#1f2937"


def pair(numbers: list[int]) -> str:
    return f"({numbers[0]}, {numbers[1]})"


def cell(ax: plt.Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), WIDTH - 0.12, 0.72, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
    ax.text(x + (WIDTH - 0.12) / 2, y + 0.36, text, ha="center", va="center", color=INK)


def row(ax: plt.Axes, y: float, name: str, texts: list[str], colours: list[str]) -> None:
    ax.text(LEFT - 0.2, y + 0.36, name, ha="right", va="center")
    for place, (text, colour) in enumerate(zip(texts, colours, strict=True)):
        cell(ax, LEFT + place * WIDTH, y, text, colour)


def down(ax: plt.Axes, x: tuple[float, float], start: float, end: float) -> None:
    ends = (x[0], start), (x[1], end)
    ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, color="#64748b"))


def main() -> None:
    scores = [sum(a * b for a, b in zip(Q, k, strict=True)) for k in K]
    powers = [2.718281828 ** (score / 2**0.5) for score in scores]
    weights = [power / sum(powers) for power in powers]
    out = [sum(w * v[i] for w, v in zip(weights, V, strict=True)) for i in (0, 1)]

    figure, ax = plt.subplots(figsize=(8.6, 5.0))
    stored, free = [OLD, OLD, NEW], [FREE] * (PLACES - 3)
    for place in range(PLACES):
        ax.text(
            LEFT + place * WIDTH + (WIDTH - 0.12) / 2, 7.0, TOKENS[place], ha="center", color="#64748b",
        )  # fmt: skip
    row(ax, 6.1, "keys", [*map(pair, K), "free", "free"], stored + free)
    row(ax, 4.65, f"scores of q = {pair(Q)}", [str(s) for s in scores], [NEW] * 3)
    row(ax, 3.2, "weights", [f"{w:.3f}" for w in weights], [NEW] * 3)
    row(ax, 1.75, "values", [*map(pair, V), "free", "free"], stored + free)
    ax.text(LEFT - 0.2, 0.66, "output", ha="right", va="center")
    cell(ax, LEFT + WIDTH, 0.3, f"({out[0]:.2f}, {out[1]:.2f})", NEW)
    for place in range(3):
        x = LEFT + place * WIDTH + (WIDTH - 0.12) / 2
        for start, end in ((6.1, 5.37), (4.65, 3.92), (3.2, 2.47)):
            down(ax, (x, x), start, end)
    middle = LEFT + WIDTH + (WIDTH - 0.12) / 2
    for place in range(3):
        x = LEFT + place * WIDTH + (WIDTH - 0.12) / 2
        down(ax, (x, middle + (place - 1) * 0.4), 1.75, 1.02)
    right = LEFT + 3 * WIDTH + 0.1
    for y, text in (
        (5.01, "q · k, number by number, summed"),
        (3.56, "÷ √2, then softmax"),
        (0.66, "each value times its weight, summed"),
    ):
        x = right if y > 1 else LEFT + 2 * WIDTH + 0.1
        ax.text(x, y, text, va="center", color="#64748b")
    for x, colour, text in ((LEFT, OLD, "read from the cache"), (LEFT + 3.4, NEW, "new in this step")):
        ax.add_patch(Rectangle((x, -0.85), 0.4, 0.4, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
        ax.text(x + 0.55, -0.65, text, va="center")
    ax.set(xlim=(-0.6, LEFT + PLACES * WIDTH + 0.6), ylim=(-1.1, 7.5))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
