"""What a budget trades: how long the longest step is, and in how many steps a long prompt is read.

python articles/figures/08_budget.py    # writes 08_budget.svg, from part08_gantt.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

PAUSE, WORD = "#b45309", "#1d4ed8"


def main() -> None:
    found = result("part08_gantt")
    entries, prompt = found["figures"]["budgets"], found["workload"]["long_prompt"]
    budgets = [entry["budget"] for entry in entries]
    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    lines = (
        ("longest_step", PAUSE, "longest step, tokens: how long those who speak may have to wait"),
        ("first_word", WORD, f"steps that the prompt of {prompt} takes: how long the newcomer waits"),
    )
    for (key, colour, label), above in zip(lines, (6, -14), strict=True):
        values = [entry[key] for entry in entries]
        ax.plot(budgets, values, "o-", color=colour, label=label)
        for budget, value in zip(budgets, values, strict=True):
            ax.annotate(
                f"{value}", (budget, value), (0, above), textcoords="offset points", ha="center", color=colour
            )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in a step, at most (max_num_batched_tokens)",
        ylim=(0.7, 3000),
    )
    ax.set_xticks(budgets, budgets)
    ax.minorticks_off()
    ax.legend(frameon=False, loc="upper center", fontsize=9)
    ax.grid(alpha=0.3)
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
