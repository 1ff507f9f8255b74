"""The formula, fitted at one draft a step, says what two to five bring: beside what was measured.

python articles/figures/16_formula.py      # writes 16_formula.svg, from part16_speculation.json
"""

from drawing import bare, plt, result, save

MOST = 5  # drafts a step


def main() -> None:
    figures = result("part16_speculation")["figures"]
    ms, one = figures["ms"], figures["one"]
    measured = {k: one["tokens_per_second"][f"{k} drafts"] for k in range(1, MOST + 1)}
    # 1. From one draft a step: how often it stands, and what its step takes beyond its passes.
    tokens = one["tokens_per_step"]["1 drafts"]
    alpha = tokens - 1
    fixed = 1000 * tokens / measured[1] - ms["rows_2"] - ms["draft"]
    # 2. The others, from the passes' times alone.
    drafts = range(1, MOST + 1)
    steps = {k: fixed + ms[f"rows_{k + 1}"] + k * ms["draft"] for k in drafts}
    predicted = {k: 1000 * sum(alpha**j for j in range(k + 1)) / steps[k] for k in drafts}

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
