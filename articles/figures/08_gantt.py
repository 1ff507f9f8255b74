"""Who runs in which step under three schedulers: two long requests, three short ones.

python articles/figures/08_gantt.py    # writes 08_gantt.svg, from part08_gantt.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

TITLES = {
    "FIFO": "FIFO (Part 6): one at a time",
    "static batches": "static batches of {width} (Part 7): nobody joins a batch under way",
    "continuous": "continuous, {width} at once, {budget} tokens a step (Part 8)",
}
PROMPT, OUTPUT, WAITS = "#b45309", "#0f766e", "#94a3b8"


def draw(ax: plt.Axes, steps: list[dict[str, int]], scene: list[list]) -> None:
    """A row per request: a line while it waits, a cell around each step it runs in."""
    for row, (name, prompt, _, after_step) in enumerate(scene):
        read = 0
        ran = [number for number, step in enumerate(steps, 1) if name in step]
        ax.plot([after_step + 0.5, ran[0] - 0.5], [row + 0.5] * 2, color=WAITS, lw=1.2, zorder=0)
        ax.plot(after_step + 0.5, row + 0.5, marker="|", color=WAITS, ms=9, mew=2, zorder=0)
        for number in ran:
            new = steps[number - 1][name]
            colour = PROMPT if read < prompt else OUTPUT
            read += new
            ax.add_patch(Rectangle((number - 0.45, row + 0.12), 0.9, 0.76, color=colour, lw=0))
            if new > 1:
                ax.text(number, row + 0.5, str(new), color="white", ha="center", va="center", fontsize=6.5)
    ax.set_yticks([row + 0.5 for row in range(len(scene))], [entry[0] for entry in scene])
    ax.set_ylim(len(scene), 0)
    ax.tick_params(axis="y", length=0)
    bare(ax, "left")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)


def main() -> None:
    found = result("part08_gantt")
    runs, workload = found["figures"]["runs"], found["workload"]
    sizes = {"width": workload["max_num_seqs"], "budget": workload["max_num_batched_tokens"]}
    figure, axes = plt.subplots(3, 1, figsize=(9.6, 6.6), sharex=True)
    for ax, (name, steps) in zip(axes, runs.items(), strict=True):
        draw(ax, steps, workload["scene"])
        ax.set_title(f"{TITLES[name].format(**sizes)}: {len(steps)} steps", loc="left", fontsize=10.5)
    last = max(map(len, runs.values()))
    axes[-1].set(xlabel="step", xlim=(0.2, last + 0.8), xticks=[1, *range(5, last + 1, 5)])
    handles = [
        Patch(color=PROMPT, label="prompt tokens (how many)"),
        Patch(color=OUTPUT, label="one output token"),
        Line2D([], [], color=WAITS, marker="|", ms=9, mew=2, markevery=[0], label="has arrived, waits"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.suptitle("Short requests need not wait for long ones", x=0.02, ha="left", weight="bold")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, __file__)


if __name__ == "__main__":
    main()
