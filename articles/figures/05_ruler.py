"""Three draws as a picture: each position has its own ruler of probabilities, and its own needle.

python articles/figures/05_ruler.py      # writes 05_ruler.svg beside this file, from the embedded model
"""

from itertools import accumulate

import matplotlib.pyplot as plt
from drawing import bare, save

from engine.cache.single import CachedForward
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState, distribution, draw, uniform
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

PROMPT, SEED, POSITIONS = "Lily opened the box and found a", 7, 3
KNOBS = SamplingParams(temperature=1.5, min_p=0.2)  # few pieces, wide enough for their words
RED = "#b91c1c"


def main() -> None:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    forward, ids = CachedForward(load_model("storyteller")), tokenizer.encode(PROMPT)
    figure, axes = plt.subplots(POSITIONS, 1, figsize=(9, 4.4), sharex=True)
    for position, ax in enumerate(axes):
        probs = distribution(forward(ids)[None], [SamplingState(KNOBS, [], [], SEED)])  # [1, V]
        pieces = probs[0].nonzero()[:, 0].tolist()  # in the order of their ids, as `draw` adds them up
        widths = probs[0, pieces].tolist()
        drawn = int(draw(probs, [SEED], [position]))
        for piece, width, end in zip(pieces, widths, accumulate(widths), strict=True):
            colour = "#fecaca" if piece == drawn else "#dbeafe"
            ax.barh(0, width, left=end - width, height=0.7, color=colour, ec="#64748b", lw=0.7)
            word, turned = tokenizer.decode([piece]).strip(), 90 if width < 0.07 else 0
            size = 7 if turned else 9
            ax.text(end - width / 2, 0, word, ha="center", va="center", rotation=turned, fontsize=size)
        u = uniform(SEED, position)
        ax.annotate("", (u, 0.3), (u, 1.0), arrowprops={"arrowstyle": "-|>", "color": RED, "lw": 1.8})
        text, left = f"uniform(seed={SEED}, position={position}) = {u:.3f}", u < 0.6
        x, side = (u + 0.01, "left") if left else (u - 0.01, "right")
        ax.text(x, 0.75, text, ha=side, va="center", color=RED, family="DejaVu Sans Mono", fontsize=8.5)
        told = tokenizer.decode(ids)[len("Lily opened the box and ") :]
        ax.set_title(f"… {told} …", loc="left", fontsize=10, weight="bold", pad=2)
        ax.set(xlim=(-0.003, 1.003), ylim=(-0.45, 1.1), yticks=[])
        bare(ax, "left")
        ids.append(drawn)
    axes[-1].set_xlabel("probabilities of the next token, laid end to end")
    figure.tight_layout()
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
