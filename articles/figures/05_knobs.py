"""One next-word distribution of storyteller: bent by temperature, then cut by each fence while it is hot.

python articles/figures/05_knobs.py      # writes 05_knobs.svg beside this file, from the embedded model
"""

import matplotlib.pyplot as plt
from drawing import bare, save

from engine.cache.single import CachedForward
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import distribution
from engine.decoding.sampling_state import SamplingState
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

PROMPT = "In the garden, there was a tiny"
SHOWN, GOOD = 8, 40  # likeliest tokens: one by one, and the end of those behind them
BLUE, GRAY, RED = "#2563eb", "#94a3b8", "#b91c1c"
KNOBS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "1.5, then top-k 40": {"temperature": 1.5, "top_k": 40},
    "1.5, then top-p 0.9": {"temperature": 1.5, "top_p": 0.9},
    "1.5, then min-p 0.1": {"temperature": 1.5, "min_p": 0.1},
}
plt.rcParams["font.size"] = 9


def main() -> None:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    logits = CachedForward(load_model("storyteller"))(tokenizer.encode(PROMPT))  # [V]
    order = logits.argsort(descending=True)  # [V]
    words = [tokenizer.decode([id]).strip() for id in order[:SHOWN].tolist()]
    rows = [SamplingState(SamplingParams(**knobs), [], [], seed=0) for knobs in KNOBS.values()]
    bent = distribution(logits.expand(len(rows), -1), rows)  # [R, V]

    figure, axes = plt.subplots(2, 3, figsize=(10, 5.4), sharex=True, sharey=True)
    for ax, title, probs in zip(axes.flat, KNOBS, bent, strict=True):
        ranked, possible = probs[order], int((probs > 0).sum())
        groups = [float(ranked[SHOWN:GOOD].sum()), float(ranked[GOOD:].sum())]
        bars = [*words, f"{SHOWN + 1}th to {GOOD}th", "all behind"]
        ax.bar(bars, [*ranked[:SHOWN].tolist(), *groups], color=[BLUE] * SHOWN + [GRAY, RED])
        ax.text(SHOWN + 1, groups[1] + 0.02, f"{groups[1]:.0%}", ha="center", color=RED, weight="bold")
        ax.set_title(title, loc="left", weight="bold")
        ax.text(SHOWN - 0.8, 0.66, f"{possible:,} tokens possible", ha="right", va="top", color="#555555")
        ax.tick_params(axis="x", rotation=90)
        ax.set_ylim(0, 0.75)
        bare(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("probability")
    figure.suptitle(f"“{PROMPT} …”: what the {len(logits):,} tokens share", x=0.02, ha="left")
    figure.tight_layout()
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
