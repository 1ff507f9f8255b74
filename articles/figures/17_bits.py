"""How much worse a model is at how few bits: a scale for a row or a group, codes above a low or centred.

python articles/figures/17_bits.py      # writes 17_bits.svg, from part17_bits.json
"""

from drawing import bare, plt, result, save

BITS = (5, 4, 3, 2)  # with more, nothing is to be seen
LOOKS = {  # side: colour, line, how far beside its place, label
    "centred_row": ("#b45309", "s-", -0.05, "centred, a scale for each row"),
    "low_row": ("#b45309", "o--", -0.02, "above a low, a scale for each row"),
    "centred_group": ("#0f766e", "s-", 0.02, "centred, groups of 64"),
    "low_group": ("#0f766e", "o--", 0.05, "above a low, groups of 64"),
}


def main() -> None:
    figures = result("part17_bits")["figures"]
    figure, ax = plt.subplots(figsize=(7.4, 4), layout="constrained")
    for side, (colour, look, beside, label) in LOOKS.items():
        found = [figures[f"{side}_{bits}"] for bits in BITS]
        worse, error = ([100 * each[name] for each in found] for name in ("worse", "error"))
        places = [bits + beside for bits in BITS]
        ax.errorbar(places, worse, error, fmt=look, color=colour, mfc="white", capsize=2, label=label)
    ax.set_yscale("log")
    ax.set(xlabel="bits of a code", ylabel="perplexity worse than fp32's by %", xticks=BITS, xlim=(5.3, 1.7))
    ax.set_yticks([0.1, 1, 10, 100, 1000, 10_000], ["0.1", "1", "10", "100", "1,000", "10,000"])
    ax.legend(frameon=False, loc="upper left")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
