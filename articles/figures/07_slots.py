"""Three sequences in their slots during one step: what is there, what the step stores, what each one sees.

python articles/figures/07_slots.py      # writes 07_slots.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

PLACES = 16
SEQUENCES = {"A": (5, 1), "B": (0, 4), "C": (9, 1)}  # tokens computed before, new in this step
OLD, NEW, EMPTY, SEEN = "#bae6fd", "#0f766e", "#f1f5f9", "#b45309"


def main() -> None:
    figure, ax = plt.subplots(figsize=(9, 3.3))
    for slot, (computed, new) in enumerate(SEQUENCES.values()):
        for place in range(PLACES):
            colour = OLD if place < computed else NEW if place < computed + new else EMPTY
            ax.barh(slot, 1, left=place, height=0.5, color=colour, ec="#94a3b8", lw=0.7)
        end = computed + new
        ax.plot([0.05, end - 0.05], [slot + 0.36] * 2, color=SEEN, lw=2.5)
        ax.text(end + 0.1, slot + 0.37, f"seen: context_lens = {end}", color=SEEN, va="center", fontsize=9)
    for colour, text in (
        (OLD, "stored by earlier steps"),
        (NEW, "stored by this step"),
        (EMPTY, "behind the end: not seen"),
    ):
        ax.barh(0, 0, height=0.5, color=colour, ec="#94a3b8", label=text)
    names = [f"slot {slot}: {name}" for slot, name in enumerate(SEQUENCES)]
    ax.set(yticks=range(len(names)), yticklabels=names, xlim=(-0.05, PLACES + 0.05), ylim=(2.6, -0.9))
    ax.set(xticks=[place + 0.5 for place in range(PLACES)], xticklabels=range(PLACES), xlabel="position")
    ax.tick_params(length=0)
    bare(ax, "left", "bottom")
    ax.legend(frameon=False, ncol=3, loc="upper left", bbox_to_anchor=(0, 1.08))
    figure.tight_layout()
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
