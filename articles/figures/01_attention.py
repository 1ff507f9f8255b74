"""The worked example of attention: three tokens, two numbers each, every step as a table of 3 × 3.

python articles/figures/01_attention.py      # writes 01_attention.svg beside this file
"""

import matplotlib.pyplot as plt
import torch
from drawing import save

from engine.attention.dense import causal_attention

TOKENS = ["·a", "·red", "·ball"]
Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]])  # [T, Dh]
K = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = torch.tensor([[4.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
INK, CELL, HIDDEN = "#222222", "#dbeafe", "#e5e7eb"


def grid(
    ax, left: float, title: str, texts: list[list[str]], shades: torch.Tensor, columns: list[str]
) -> None:
    """A table whose upper left corner is at (left, 0); `shades` from 0 to 1, NaN for what is hidden."""
    ax.text(left + len(columns) / 2, 1.02, title, ha="center", weight="bold")
    for j, column in enumerate(columns):
        ax.text(left + j + 0.5, 0.45, column, ha="center", fontsize=9, color="#555555")
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            shade = shades[i, j].item()
            colour = HIDDEN if shade != shade else plt.cm.Blues(0.12 + 0.45 * shade)
            ax.add_patch(plt.Rectangle((left + j, -i - 0.72), 0.94, 0.94, fc=colour, ec="none"))
            ax.text(left + j + 0.47, -i - 0.25, text, ha="center", va="center")


def main() -> None:
    products = Q @ K.T  # [T, T]
    future = torch.ones(3, 3).triu(1).bool()
    scores = (products / 2**0.5).masked_fill(future, -torch.inf)
    weights = scores.softmax(dim=-1)
    out = weights @ V  # [T, Dh]
    assert torch.allclose(out, causal_attention(*(x[:, None] for x in (Q, K, V)))[:, 0])

    figure, ax = plt.subplots(figsize=(10.5, 3.1))
    ax.set(xlim=(-1.3, 13.4), ylim=(-3.5, 1.5))
    ax.axis("off")
    for i, token in enumerate(TOKENS):
        ax.text(-0.15, -i - 0.25, token, ha="right", va="center", weight="bold")
    nothing = torch.full((3, 3), torch.nan)
    tables = [
        ("1. q·k", products, "{:.0f}", torch.where(future, nothing, products / 3)),
        ("2. / √2, future hidden", scores, "{:.2f}", torch.where(future, nothing, products / 3)),
        ("3. softmax: weights", weights, "{:.2f}", torch.where(future, nothing, weights)),
    ]
    for number, (title, values, form, shades) in enumerate(tables):
        texts = [["−∞" if x == -torch.inf else form.format(x) for x in row.tolist()] for row in values]
        grid(ax, 3.7 * number, title, texts, shades, TOKENS)
    texts = [[f"{x:.2f}" for x in row] for row in out.tolist()]
    grid(ax, 11.1, "4. mean: output", texts, out / 8, ["", ""])
    ax.text(5.2, -3.2, "columns: the token looked at", ha="center", fontsize=8.5, color="#555555")
    ax.text(-1.2, -3.2, "rows: the token that looks", ha="left", fontsize=8.5, color="#555555")
    figure.tight_layout(pad=0.3)
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
