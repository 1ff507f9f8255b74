"""What a decode step waits for: time at least for 1 to 256 sequences, and what was measured.

python articles/figures/13_roofline.py      # writes 13_roofline.svg, the slider's picture without JavaScript
"""

import importlib

from drawing import bare, plt, save

play = importlib.import_module("13_roofline_play")
MEMORY, ARITHMETIC = "#b45309", "#0f766e"
BATCHES = range(1, 257)
PANELS = (("part07_batching", "gpt2"), ("part13_engine", "gpt2-xl"))  # a record, and one of its models


def panel(ax: plt.Axes, name: str, model: str) -> None:
    dots = [dot for dot in play.dots() if (dot["record"], dot["model"]) == (name, model)]
    machine, context, bits = (dots[0][key] for key in ("machine", "context", "bits"))
    steps = [play.waits(model, machine, batch, context, bits) for batch in BATCHES]
    for words, colour, place in (("memory", MEMORY, 0), ("arithmetic", ARITHMETIC, 1)):
        ax.plot(BATCHES, [1e3 * step[place] for step in steps], color=colour, lw=2, label=words)
    batches, times = zip(*((dot["batch"], dot["ms"]) for dot in dots), strict=True)
    ax.plot(batches, times, "o", color="#16202c", label="measured")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = BATCHES[0], 4, 16, 64, BATCHES[-1]
    ax.set_xticks(ticks, map(str, ticks))
    title = f"{model} in {bits} bits, {context:g} tokens each\n{play.machines()[machine]['words']}"
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("sequences in a step")
    bare(ax)


def main() -> None:
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9.4, 3.8), layout="constrained")
    for ax, (name, model) in zip(axes, PANELS, strict=True):
        panel(ax, name, model)
    axes[0].set_ylabel("ms a step: at least the upper line")
    axes[0].legend(frameon=False)
    save(figure, __file__)


if __name__ == "__main__":
    main()
