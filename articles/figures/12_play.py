"""Six requests in a memory of 48 tokens: what the block table plays, and a picture of it.

python articles/figures/12_play.py    # writes 12_play.play.json and 12_play.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save, write_recording
from matplotlib.patches import Rectangle

from benchmarks.part12_play import recording

HUES = ("#c2570c", "#2563eb", "#15803d", "#a21caf", "#a16207", "#0e7490", "#475569")  # as play.css has them
KEPT, FREE, ASIDE = "#d5dbe3", "white", "#b91c1c"


def draw(ax: plt.Axes, run: dict, names: list[str]) -> None:
    """A column for each step, a row for each block: its tokens in the colour of the first that holds it."""
    size = run["block_size"]
    for step, moment in enumerate(run["moments"], 1):
        for block in moment.get("known", ()):
            ax.add_patch(Rectangle((step - 0.5, block), 0.9, 0.9, color=KEPT, lw=0))
        for name, (computed, _, table) in reversed(moment["sequences"].items()):
            for k, block in enumerate(table):
                filled = min(max(computed - k * size, 0), size) / size
                colour = HUES[names.index(name) % len(HUES)]
                ax.add_patch(Rectangle((step - 0.5, block), 0.9, 0.9, fc=FREE, ec=ASIDE, lw=0.4))
                ax.add_patch(Rectangle((step - 0.5, block), 0.9 * filled, 0.9, color=colour, lw=0))
    ax.set(xlim=(0.3, len(run["moments"]) + 0.7), ylim=(run["num_blocks"], 0))
    bare(ax)


def main() -> None:
    recorded = recording()
    write_recording(__file__, recorded)
    runs, names = recorded["runs"], list(recorded["words"])
    shown = {"12 blocks of 4 tokens, with a prefix cache": runs[0], "2 slots of 24 tokens": runs[-1]}
    figure, axes = plt.subplots(
        2, 1, figsize=(9.6, 5.2), sharex=True, layout="constrained", height_ratios=(3, 1)
    )
    for ax, (title, run) in zip(axes, shown.items(), strict=True):
        draw(ax, run, names)
        ax.set_title(f"{title}: {len(run['moments'])} steps", loc="left", fontsize=10)
    axes[0].set(ylabel="block")
    axes[1].set(ylabel="slot", xlabel="step", yticks=(0, 1))
    axes[1].set_xlim(0.3, max(len(run["moments"]) for run in shown.values()) + 0.7)
    handles = [Rectangle((0, 0), 1, 1, color=HUES[i % len(HUES)], label=name) for i, name in enumerate(names)]
    handles.append(Rectangle((0, 0), 1, 1, color=KEPT, label="free, can be found"))
    handles.append(Rectangle((0, 0), 1, 1, fc=FREE, ec=ASIDE, label="set aside, unused"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    save(figure, __file__)


if __name__ == "__main__":
    main()
