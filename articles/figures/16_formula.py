"""The formula, fitted at one draft a step, says what two to five bring: beside what was measured.

python articles/figures/16_formula.py      # writes 16_formula.svg, from part16_speculation.json
"""

import sys
from pathlib import Path

from drawing import bare, plt, result, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.part16_speculation import MOST, by_the_formula


def main() -> None:
    figures = result("part16_speculation")["figures"]
    one, predicted = figures["one"], by_the_formula(figures)
    drafts = range(1, MOST + 1)
    measured = {k: one["tokens_per_second"][f"{k} drafts"] for k in drafts}

    figure, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    ax.plot(drafts, predicted.values(), "o-", mfc="white", color="#0f766e", label="the formula, fitted at 1")
    ax.plot(drafts, measured.values(), "o", color="#b45309", label="measured")
    plain = one["tokens_per_second"]["this engine, no drafts"]
    ax.axhline(plain, color="#334155", lw=0.8, ls=":")
    ax.text(MOST + 0.1, plain, "no drafts", fontsize=8.5, color="#334155", va="bottom", ha="right")
    ax.set(xlabel="drafts a step", ylabel="tokens/s, one stream", xticks=drafts)
    ax.set_ylim(0, 1.08 * max(predicted.values()))
    ax.legend(frameon=False, loc="lower right")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
