"""One mixed step as the model sees it: its rows, and which keys in whose slot each row may look at.

python articles/figures/08_mixed.py    # writes 08_mixed.svg, from part08_gantt.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save
from matplotlib.patches import Patch, Rectangle

STEP = 5  # in which c joins, while A and B are being answered
SEEN, NEW, HIDDEN, INK = "#bae6fd", "#0f766e", "#f8fafc", "#334155"


def main() -> None:
    steps = result("part08_gantt")["figures"]["runs"]["continuous"]
    step = steps[STEP - 1]
    lengths = {name: sum(earlier.get(name, 0) for earlier in steps[:STEP]) for name in step}
    starts, column = {}, 0
    for name, length in lengths.items():
        starts[name] = column
        column += length + 2  # a gap between two slots
    figure, ax = plt.subplots(figsize=(9.8, 3.1))
    row, rows = 0, []
    for name, new in step.items():
        for i in range(new):
            position = lengths[name] - new + i
            rows.append(f"{name}, position {position}")
            for other, length in lengths.items():
                for key in range(length):
                    is_new = key >= length - step[other]
                    seen = other == name and key <= position
                    colour = (NEW if is_new else SEEN) if seen else HIDDEN
                    place = (starts[other] + key, row)
                    ax.add_patch(Rectangle(place, 1, 1, fc=colour, ec="#94a3b8", lw=0.4))
            row += 1
    for name, length in lengths.items():
        middle = starts[name] + length / 2
        ax.text(
            middle, -0.35, f"{name}'s slot: {length} keys", ha="center", va="bottom", color=INK, fontsize=9
        )
    ax.set(xlim=(-0.3, column - 1.7), ylim=(row, -1.2), xticks=[])
    ax.set_yticks([number + 0.5 for number in range(row)], rows, fontsize=8)
    ax.tick_params(length=0)
    bare(ax, "left", "bottom")
    handles = [
        Patch(fc=SEEN, ec="#94a3b8", label="seen: computed in earlier steps"),
        Patch(fc=NEW, ec="#94a3b8", label="seen: computed in this step"),
        Patch(fc=HIDDEN, ec="#94a3b8", label="not seen"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    total = sum(step.values())
    parts = " + ".join(f"{name} {new}" for name, new in step.items())
    ax.set_title(f"Step {STEP}: {parts} = {total} rows on one axis", loc="left", weight="bold", fontsize=11)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save(figure, __file__)


if __name__ == "__main__":
    main()
