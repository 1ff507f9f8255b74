"""What a decode step costs as more sequences share it, and the line of two numbers, for two models.

python articles/figures/07_crowd.py    # writes 07_crowd.svg, from part07_line.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

MODELS = {"storyteller": "storyteller", "gpt2_shape": "GPT-2 124M's shape"}
STEP, ONCE, EACH, INK = "#0f766e", "#1d4ed8", "#93c5fd", "#334155"


def main() -> None:
    figures = result("part07_line")["figures"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.1), layout="constrained")
    for ax, (name, title) in zip(axes, MODELS.items(), strict=True):
        found = figures[name]
        crowds, once = found["crowds"], found["once_ms"]
        line = [once + crowd * found["each_ms"] for crowd in (0, crowds[-1])]
        ax.fill_between((0, crowds[-1]), 0, once, color=ONCE, alpha=0.25, lw=0, label="paid once")
        ax.fill_between((0, crowds[-1]), once, line, color=EACH, alpha=0.35, lw=0, label="paid for each")
        ax.plot((0, crowds[-1]), line, color=ONCE, lw=1.2, label="the line through the steps of 2 to 16")
        ax.plot(crowds, found["step_ms"], "o", color=STEP, label="measured")
        alone = [found["step_ms"][0] * crowd for crowd in crowds]
        ax.plot(crowds, alone, ":", color=INK, label="if nothing were shared")
        ax.set(ylabel="time of one decode step, ms", xlabel="sequences in the step", xlim=(0, crowds[-1] + 1))
        ax.set_ylim(0, found["step_ms"][-1] * 1.25)
        ax.set_title(title, loc="left", weight="bold")
        ax.grid(alpha=0.3)
        bare(ax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, __file__)


if __name__ == "__main__":
    main()
