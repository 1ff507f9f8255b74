"""One next-word distribution of storyteller, bent by each knob.

python articles/figures/05_knobs.py      # writes 05_knobs.svg beside this file, from the embedded model
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from engine.cache.single import CachedForward
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import Row, distribution
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer

PROMPT = "In the garden, there was a tiny"
SHOWN = 16  # likeliest tokens
KNOBS = {
    "as the model said it": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "top-k 6": {"top_k": 6},
    "top-p 0.5": {"top_p": 0.5},
    "temperature 1.5, min-p 0.4": {"temperature": 1.5, "min_p": 0.4},
}
plt.rcParams.update({"svg.hashsalt": "05_knobs", "font.family": "DejaVu Sans", "font.size": 9})


def main() -> None:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    logits = CachedForward(load_model("storyteller"))(tokenizer.encode(PROMPT))  # [V]
    ids = logits.topk(SHOWN).indices
    words = [tokenizer.decode([id]).strip() for id in ids.tolist()]
    rows = [Row(SamplingParams(**knobs), [], [], seed=0) for knobs in KNOBS.values()]
    bent = distribution(logits.expand(len(rows), -1), rows)  # [R, V]

    figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex=True, sharey=True)
    for ax, title, probs in zip(axes.flat, KNOBS, bent, strict=True):
        heights = probs[ids].tolist()
        ax.bar(words, heights, color=["#2563eb" if height else "#cccccc" for height in heights])
        ax.plot(words, bent[0, ids], drawstyle="steps-mid", color="#555555", lw=0.8, ls=":")
        others, possible = float(1 - probs[ids].sum()), int((probs > 0).sum())
        ax.set_title(title, loc="left", weight="bold")
        note = f"{possible:,} tokens possible\nnot shown here: {max(others, 0):.0%} of it"
        ax.text(0.97, 0.92, note, ha="right", va="top", transform=ax.transAxes, fontsize=8.5, color="#555555")
        ax.tick_params(axis="x", rotation=90)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("probability")
    figure.suptitle(f"“{PROMPT} …”: the {SHOWN} likeliest of {len(logits):,} tokens", x=0.02, ha="left")
    figure.tight_layout()
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
