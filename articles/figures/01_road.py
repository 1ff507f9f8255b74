"""The road of Part 1 as a picture: one lane per token, lanes meet in attention only, and only downwards.

python articles/figures/01_road.py      # writes 01_road.svg beside this file, from the embedded model
"""

import matplotlib.pyplot as plt
import torch
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from engine.attention.dense import causal
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

PROMPT = "Once upon a"
INK, TOKEN, MEET, ALONE = "#222222", "#dbeafe", "#fde68a", "#d1fae5"


def box(ax, x: float, y: float, width: float, text: str, colour: str, height: float = 0.5) -> None:
    """A rounded box centred on (x, y)."""
    corner, style = (x - width / 2, y - height / 2), "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=colour, ec=INK, lw=0.8))
    ax.text(x, y, text, ha="center", va="center")


def arrow(ax, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, lw=0.9, color=colour))


def heading(ax, x: float, what: str, shape: str, where: str) -> None:
    ax.text(x, 3.2, what, ha="center", weight="bold")
    ax.text(x, 2.92, shape, ha="center")
    ax.text(x, -1.2, where, ha="center", family="DejaVu Sans Mono", fontsize=8.5, color="#555555")


def main() -> None:
    torch.set_num_threads(1)
    tokenizer, model = Tokenizer.from_pretrained("storyteller"), load_model("storyteller")
    token_ids = tokenizer.encode(PROMPT)
    T = len(token_ids)
    x = model.embed(torch.tensor(token_ids)) + model.embed_position(torch.arange(T))  # [T, D]
    hidden = model(torch.tensor(token_ids), torch.arange(T), causal)  # [T, D]
    chances, ids = model.logits(hidden[-1:])[0].softmax(dim=-1).topk(3)

    figure, ax = plt.subplots(figsize=(11.5, 4.3))
    ax.set(xlim=(-0.8, 12.4), ylim=(-1.4, 3.5))
    ax.axis("off")
    lanes = [2.2 - i for i in range(T)]
    for lane, (y, id) in enumerate(zip(lanes, token_ids, strict=True)):
        box(ax, 0, y, 1.0, tokenizer.decode([id]).replace(" ", "·"), TOKEN)
        box(ax, 1.6, y, 0.8, str(id), TOKEN)
        strip(ax, 3.1, y, x[lane, :12])
        box(ax, 7.55, y, 0.9, "MLP", ALONE)
        strip(ax, 9.15, y, hidden[lane, :12])
        for start, end in [(0.52, 1.18), (2.02, 2.48), (3.72, 4.55), (6.05, 7.08), (8.02, 8.53)]:
            arrow(ax, (start, y), (end, y))
        for above in lanes[:lane]:
            arrow(ax, (4.75, above - 0.02), (5.95, y + 0.06), "#b45309")
        ax.plot([4.55, 6.05], [y, y], color=INK, lw=0.9)

    ax.add_patch(
        FancyBboxPatch((4.6, -0.5), 1.5, 3.05, boxstyle="round,pad=0.02", fc=MEET, ec="none", zorder=0)
    )
    frame = FancyBboxPatch(
        (4.4, -0.58), 3.75, 3.21, boxstyle="round,pad=0.02", fc="none", ec=INK, ls="--", lw=0.8
    )
    ax.add_patch(frame)
    ax.text(5.35, -0.47, "attention:\ntokens meet", ha="center", va="bottom", fontsize=8.5)
    ax.text(7.3, -0.47, "each token\nfor itself", ha="center", va="bottom", fontsize=8.5)
    arrow(ax, (9.77, lanes[-1]), (10.3, lanes[-1]))
    for i, (chance, id) in enumerate(zip(chances.tolist(), ids.tolist(), strict=True)):
        y = lanes[-1] + 0.5 - 0.42 * i
        ax.barh(y, 1.1 * chance + 0.02, left=10.4, height=0.3, color="#60a5fa")
        ax.text(11.65, y, tokenizer.decode([id]).replace(" ", "·"), va="center")
    ax.text(
        10.4, 1.55, "only the last row\nis about the word\nthat is not there yet", va="center", fontsize=8.5
    )

    heading(ax, 0, "words", f"{len(PROMPT.encode())} bytes", "Tokenizer")
    heading(ax, 1.6, "token ids", "[T]", ".encode")
    heading(ax, 3.1, "vectors", "[T, D]", "Model.embed\n+ embed_position")
    heading(ax, 6.3, "a block, L times over", "[T, D] to [T, D]", "Block.forward, attend")
    heading(ax, 9.15, "final vectors", "[T, D]", "Model.norm")
    heading(ax, 11.1, "next word", "logits [R, V]", "Model.logits\nsoftmax")
    figure.tight_layout(pad=0.3)
    save(figure, __file__, tight=False)


def strip(ax, x: float, y: float, values: torch.Tensor) -> None:
    """A vector as a row of coloured squares: its first components."""
    values = values / values.abs().max()
    width = 1.2 / len(values)
    for i, value in enumerate(values.tolist()):
        colour = plt.cm.RdBu_r(0.5 + value / 2)
        ax.add_patch(
            plt.Rectangle((x - 0.6 + i * width, y - 0.15), width, 0.3, fc=colour, ec="white", lw=0.3)
        )


if __name__ == "__main__":
    main()
