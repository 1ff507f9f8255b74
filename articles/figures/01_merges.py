"""How one word is merged, from bytes to tokens: a tree that grows upwards, a rank at each merge.

python articles/figures/01_merges.py      # writes 01_merges.svg beside this file, from the embedded model
"""

from itertools import pairwise

import matplotlib.pyplot as plt
from drawing import save

from engine.models.checkpoint import read_json, resolve
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import byte_alphabet

WORD = " unbelievable"


def main() -> None:
    model = read_json(resolve("storyteller") / "tokenizer.json")["model"]
    rank = {
        tuple(merge.split(" ") if isinstance(merge, str) else merge): i
        for i, merge in enumerate(model["merges"])
    }
    alphabet = byte_alphabet()
    # A piece is (its text, where it is centred, how high it stands).
    pieces = [(alphabet[byte], float(i), 0) for i, byte in enumerate(WORD.encode())]

    figure, ax = plt.subplots(figsize=(9, 3.6))
    for text, x, _ in pieces:
        ax.text(
            x, 0, text, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "#999999"}
        )
    step = 0
    while known := [
        (rank[a[0], b[0]], i) for i, (a, b) in enumerate(pairwise(pieces)) if (a[0], b[0]) in rank
    ]:
        best, i = min(known)
        step += 1
        (left, x1, y1), (right, x2, y2) = pieces[i : i + 2]
        x, y = (x1 + x2) / 2, max(y1, y2) + 1
        for x_below, y_below in ((x1, y1), (x2, y2)):
            ax.plot([x_below, x], [y_below, y], color="#999999", lw=1, zorder=0)
        ax.text(
            x,
            y,
            left + right,
            ha="center",
            va="center",
            bbox={"boxstyle": "round", "fc": "#dbeafe", "ec": "#222222"},
        )
        ax.text(
            x,
            y + 0.42,
            f"{step}. rank {best}",
            ha="center",
            va="center",
            fontsize=7.5,
            color="#b45309",
            bbox={"fc": "white", "ec": "none", "pad": 1},
        )
        pieces[i : i + 2] = [(left + right, x, y)]

    ids = [model["vocab"][text] for text, _, _ in pieces]
    assert ids == Tokenizer.from_pretrained("storyteller").encode(WORD)
    for (_, x, _), id in zip(pieces, ids, strict=True):
        ax.text(x, -0.85, str(id), ha="center", va="center", weight="bold")
    ax.text(-0.9, 0, "bytes", ha="right", va="center")
    ax.text(-0.9, -0.85, "token ids", ha="right", va="center", weight="bold")
    top = max(y for _, _, y in pieces)
    ax.set(xlim=(-2.4, len(WORD) - 0.4), ylim=(-1.2, top + 0.8))
    ax.axis("off")
    figure.tight_layout(pad=0.3)
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
