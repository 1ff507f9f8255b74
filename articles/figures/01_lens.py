"""The logit lens: what `storyteller` would say if it stopped after the embedding, or after one of its blocks.

python articles/figures/01_lens.py    # writes 01_lens.svg beside this file
"""

import matplotlib.pyplot as plt
import torch
from drawing import bare, save

from engine.attention.dense import causal
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

SENTENCES = ("Tim had a red ball. He loved his red", "Lily went to the park. She wanted to play on the")
BAR, INK = "#93c5fd", "#1f2937"


@torch.inference_mode()
def lens(prompt: str, model: torch.nn.Module, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """(the likeliest next token, its probability) after the embedding and after each block."""
    token_ids = torch.tensor(tokenizer.encode(prompt))  # [T]
    x = model.embed(token_ids) + model.embed_position(torch.arange(len(token_ids)))  # [T, D]
    stages = [x]
    for block in model.blocks:
        stages.append(block(stages[-1], causal))
    said = []
    for x in stages:
        chances = model.logits(model.norm(x[-1:]))[0].softmax(dim=-1)  # [V]
        said.append((tokenizer.decode([int(chances.argmax())]), float(chances.max())))
    return said


def main() -> None:
    model, tokenizer = load_model("storyteller"), Tokenizer.from_pretrained("storyteller")
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.0), sharey=True)
    for ax, prompt in zip(axes, SENTENCES, strict=True):
        said = lens(prompt, model, tokenizer)
        places = range(len(said))
        ax.barh(places, [chance for _, chance in said], color=BAR, height=0.72)
        for place, (word, chance) in zip(places, said, strict=True):
            ax.text(0.02, place, f"{word.replace(' ', '·')}  {chance:.2f}", va="center", color=INK)
        ax.set_title(prompt, loc="left", fontsize=9, weight="bold")
        ax.set(xlim=(0, 1.02), xlabel="probability of the likeliest token")
        ax.set_yticks(places, ["embedding", *(f"block {i}" for i in places[1:])])
        bare(ax)
    axes[0].set_ylim(len(said) - 0.4, -0.6)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
