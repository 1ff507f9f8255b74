"""Who sits where in which step under three schedulers, and how many tokens each step has.

python articles/figures/08_gantt.py    # writes 08_gantt.svg, from part08_gantt.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save
from matplotlib.patches import Patch, Rectangle

TITLES = {
    "FIFO": "FIFO (Part 6): one at a time",
    "static batches": "static batches of {width} (Part 7): nobody joins a batch under way",
    "continuous": "continuous, {width} seats, {budget} tokens a step (Part 8)",
}
PROMPT, OUTPUT, EMPTY, INK = "#b45309", "#0f766e", "#cbd5e1", "#334155"
TALLEST = 22  # tokens: what is higher is cut off, and says how high it is


def seats(steps: list[dict[str, int]], width: int) -> dict[str, int]:
    """name -> its seat, from 0: whoever comes takes the first that is free."""
    last = {name: number for number, step in enumerate(steps) for name in step}
    seat_of: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in step:
            if name not in seat_of:
                taken = {seat for other, seat in seat_of.items() if last[other] >= number}
                seat_of[name] = min(set(range(width)) - taken)
    return seat_of


def draw_seats(ax: plt.Axes, steps: list[dict[str, int]], scene: list[list], width: int) -> None:
    """A row per seat: a cell for each step, with who sits there and how many prompt tokens it reads."""
    seat_of, read = seats(steps, width), dict.fromkeys((entry[0] for entry in scene), 0)
    prompts = {name: prompt for name, prompt, _, _ in scene}
    for number, step in enumerate(steps, 1):
        for seat in range(width):
            ax.add_patch(Rectangle((number - 0.45, seat + 0.1), 0.9, 0.8, ec=EMPTY, fc="none", lw=0.8))
        for name, new in step.items():
            reads = read[name] < prompts[name]
            read[name] += new
            place = (number - 0.45, seat_of[name] + 0.1)
            ax.add_patch(Rectangle(place, 0.9, 0.8, color=PROMPT if reads else OUTPUT, lw=0))
            text = f"{name}\n{new}" if new > 1 else name
            middle = seat_of[name] + 0.5
            ax.text(
                number, middle, text, color="white", ha="center", va="center", fontsize=6, linespacing=0.9
            )
    for name, _, _, after_step in scene:
        if after_step:
            ax.text(
                after_step + 0.5,
                -0.12,
                f"{name}\N{BLACK DOWN-POINTING SMALL TRIANGLE}",
                ha="center",
                fontsize=7,
            )
    ax.set(yticks=[seat + 0.5 for seat in range(width)], ylim=(width, -0.35))
    ax.set_yticklabels([f"seat {seat + 1}" for seat in range(width)], fontsize=8)
    ax.tick_params(axis="both", length=0, labelbottom=False)
    bare(ax, "left", "bottom")


def draw_fill(ax: plt.Axes, steps: list[dict[str, int]], budget: int | None) -> None:
    """How many tokens each step has, and the line that they may reach."""
    sizes = [sum(step.values()) for step in steps]
    ax.bar(range(1, len(sizes) + 1), [min(size, TALLEST) for size in sizes], width=0.9, color="#94a3b8")
    for number, size in enumerate(sizes, 1):
        if size > TALLEST:
            ax.text(number + 0.6, TALLEST, f"{size} tokens", va="top", fontsize=7)
    if budget:
        ax.axhline(budget, color=INK, ls="--", lw=0.8)
    ax.set(ylim=(0, TALLEST), yticks=[0, 16])
    ax.tick_params(axis="y", labelsize=7)
    bare(ax)


def main() -> None:
    found = result("part08_gantt")
    runs, workload = found["figures"]["runs"], found["workload"]
    width, budget = workload["max_num_seqs"], workload["max_num_batched_tokens"]
    figure, axes = plt.subplots(6, 1, figsize=(9.8, 8.2), sharex=True, height_ratios=[3, 1] * 3)
    for (top, below), (name, steps) in zip(
        zip(axes[::2], axes[1::2], strict=True), runs.items(), strict=True
    ):
        draw_seats(top, steps, workload["scene"], width)
        draw_fill(below, steps, budget if name == "continuous" else None)
        title = TITLES[name].format(width=width, budget=budget)
        top.set_title(f"{title}: {len(steps)} steps", loc="left", fontsize=10.5)
    last = max(map(len, runs.values()))
    axes[3].set_ylabel("tokens in the step", fontsize=8)
    axes[-1].set(xlabel="step", xlim=(0.2, last + 0.8), xticks=[1, *range(5, last + 1, 5)])
    handles = [
        Patch(color=PROMPT, label="reads so many prompt tokens"),
        Patch(color=OUTPUT, label="one output token"),
        Patch(fc="none", ec=EMPTY, label="an empty seat"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.suptitle("A free seat is taken at once", x=0.02, ha="left", weight="bold")
    figure.tight_layout(rect=(0, 0.04, 1, 1), h_pad=0.4)
    save(figure, __file__)


if __name__ == "__main__":
    main()
