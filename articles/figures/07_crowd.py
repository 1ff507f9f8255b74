"""What a decode step costs as more sequences share it: linear layers, attention, the rest, for two models.

python articles/figures/07_crowd.py    # writes 07_crowd.svg, from part07_batching.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

MODELS = {
    "storyteller": "storyteller, {:.0f} MB of weights",
    "gpt2_shape": "GPT-2's shape, {:.0f} MB of weights",
}
PARTS = {"linear": "linear layers (the weights)", "attention": "attention", "rest": "the rest"}
COLOURS, INK = ("#1d4ed8", "#b45309", "#94a3b8"), "#334155"


def main() -> None:
    figures = result("part07_batching")["figures"]
    crowds = figures["crowds"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.1), layout="constrained")
    for ax, (name, title) in zip(axes, MODELS.items(), strict=True):
        found = figures["split"][name]
        step = found["step_ms"]
        layers = [found[f"{part}_ms"] for part in PARTS]
        ax.stackplot(crowds, layers, labels=PARTS.values(), colors=COLOURS, alpha=0.8)
        ax.plot(crowds, [step[0] * s for s in crowds], ":", color=INK, label="if nothing were shared")
        ax.set(ylabel="time of one decode step, ms", xlabel="sequences in the step", xlim=(1, crowds[-1]))
        ax.set_ylim(0, step[-1] * 1.25)
        ax.set_title(title.format(found["megabytes"]), loc="left", weight="bold")
        ax.grid(alpha=0.3)
        bare(ax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, __file__)


if __name__ == "__main__":
    main()
