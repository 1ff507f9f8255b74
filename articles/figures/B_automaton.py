"""(ab)+c as an automaton: above over bytes, below over the tokens a, b, ab, ba and c.

python articles/figures/B_automaton.py    # writes B_automaton.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Circle, FancyArrowPatch

INK, GREY, BYTE, SPAN = "#1f2937", "#64748b", "#334155", "#b91c1c"
LEFT = ["(ab)+c", "b(ab)*c", "(ab)*c", "empty"]  # what is left to match, by state
X = [0, 4, 8, 12]
R = 0.55


def states(ax, y: float) -> None:
    for number, x in enumerate(X):
        ax.add_patch(Circle((x, y), R, facecolor="#f8fafc", edgecolor=INK, lw=1.2))
        if number == 3:  # the output may end here
            ax.add_patch(Circle((x, y), R - 0.1, facecolor="none", edgecolor=INK, lw=1.0))
        ax.text(x, y, str(number), ha="center", va="center", color=INK, fontsize=12)


def arrow(ax, y, start, end, words, bend=0.0, colour=BYTE, lift=0.0, style="-") -> None:
    """From state to state, through the air if `bend` is not 0; `lift` moves the words up."""
    side = 1 if X[end] >= X[start] else -1
    a = (X[start] + side * R * 0.85, y + R * 0.55 * (1 if bend * side < 0 else -1) * (bend != 0))
    b = (X[end] - side * R * 0.85, y + R * 0.55 * (1 if bend * side < 0 else -1) * (bend != 0))
    patch = FancyArrowPatch(
        a, b, arrowstyle="-|>", mutation_scale=12, color=colour, lw=1.3, connectionstyle=f"arc3,rad={bend}",
        linestyle=style,
    )  # fmt: skip
    ax.add_patch(patch)
    ax.text((X[start] + X[end]) / 2, y + lift, words, ha="center", va="center", color=colour, fontsize=11)


def loop(ax, y, state, words) -> None:
    """From a state back to itself, above it."""
    ax.add_patch(
        FancyArrowPatch(
            (X[state] - 0.3, y + R * 0.85), (X[state] + 0.3, y + R * 0.85), arrowstyle="-|>",
            mutation_scale=12, color=SPAN, lw=1.3, connectionstyle="arc3,rad=-2.6",
        )
    )  # fmt: skip
    ax.text(X[state], y + 1.6, words, ha="center", va="center", color=SPAN, fontsize=11)


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.6, 5.4))
    ax.set(xlim=(-2.9, 14.2), ylim=(-2.5, 7.3), aspect="equal")
    ax.axis("off")
    top, bottom = 5.2, 0.2
    for y, words in ((top, "over\nbytes"), (bottom, "over\ntokens")):
        ax.text(-2.8, y, words, va="center", color=INK, fontweight="bold")
        states(ax, y)
    for x, words in zip(X, LEFT, strict=True):
        ax.text(x, top + 1.5, words, ha="center", color=GREY, fontsize=10, family="monospace")
    ax.text(-2.8, top + 1.5, "left to match", color=GREY, fontsize=9)
    for y in (top, bottom):
        arrow(ax, y, 0, 1, "a", lift=0.3)
        arrow(ax, y, 1, 2, "b", bend=-0.18, lift=0.95)
        arrow(ax, y, 2, 1, "a", bend=-0.18, lift=-0.95)
        arrow(ax, y, 2, 3, "c", lift=0.3)
    loop(ax, bottom, 1, "ba")
    loop(ax, bottom, 2, "ab")
    arrow(ax, bottom, 0, 2, "ab", bend=0.42, colour=SPAN, lift=-2.05)
    ax.text(
        -2.8, -2.45,
        "Double circle: the output may end. Red: a token of two bytes goes through a state between. "
        "ba goes from 1 through 2 to 1.",
        color=GREY, fontsize=9,
    )  # fmt: skip
    save(figure, __file__)


if __name__ == "__main__":
    main()
