"""Milliseconds for the next token by length of the sequence, without a cache: attention and all else.

python articles/figures/02_growth.py    # writes 02_growth.svg beside this file, from part02_growth.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

ATTENTION, ELSE = "#b45309", "#60a5fa"


def main() -> None:
    measured = result("part02_growth")
    lengths, whole, _, all_else, *_ = zip(*measured["tables"]["growth"]["rows"], strict=True)
    base = measured["figures"]["base"]  # tokens: the proportional line goes through this measurement
    per_token = whole[lengths.index(base)] / base

    figure, ax = plt.subplots(figsize=(7.2, 3.8))
    ax.fill_between(lengths, all_else, whole, color=ATTENTION, alpha=0.25, lw=0)
    ax.fill_between(lengths, all_else, color=ELSE, alpha=0.25, lw=0)
    ax.plot(lengths, whole, marker="o", ms=4, color=ATTENTION, label="the whole step")
    ax.plot(lengths, all_else, marker="o", ms=4, color=ELSE, label="all of it but attention")
    ax.plot(
        [0, lengths[-1]], [0, lengths[-1] * per_token], ls="--", color="#555555",
        label=f"in proportion to T, from T = {base}",
    )  # fmt: skip
    middle = 4 * len(lengths) // 5
    ax.text(lengths[middle], (all_else[middle] + whole[middle]) / 2, "attention", ha="center", va="center")
    ax.text(lengths[middle], all_else[middle] / 2, "everything else", ha="center", va="center")
    ax.set(xlabel="tokens so far, T", ylabel="time for the next token, ms", xlim=(0, None), ylim=(0, None))
    ax.set_title("Attention bends the curve", loc="left", weight="bold")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
