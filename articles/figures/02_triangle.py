"""Which tokens go through the model at each step of Part 2's loop: the new one, and all old ones again.

python articles/figures/02_triangle.py      # writes 02_triangle.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Patch, Rectangle

PROMPT, NEW = 4, 12  # tokens
FIRST_TIME, AGAIN = "#2563eb", "#fde68a"


def main() -> None:
    figure, ax = plt.subplots(figsize=(7.2, 4.6))
    computed = 0
    for step in range(NEW):
        length = PROMPT + step
        for position in range(length):
            first_time = step == 0 or position == length - 1
            colour = FIRST_TIME if first_time else AGAIN
            ax.add_patch(Rectangle((position, step), 0.9, 0.9, color=colour, lw=0))
            computed += 1
    different = PROMPT + NEW - 1
    ax.set(xlim=(-0.2, different + 0.2), ylim=(NEW + 0.1, -0.3), aspect="equal")
    ax.set_xticks([i + 0.45 for i in range(different)], range(different))
    ax.set_yticks([i + 0.45 for i in range(NEW)], range(1, NEW + 1))
    ax.tick_params(length=0)
    ax.set_xlabel("position in the sequence")
    ax.set_ylabel("new token number")
    ax.spines[:].set_visible(False)
    ax.set_title(f"{computed} tokens computed, {different} different ones", loc="left", weight="bold")
    handles = [
        Patch(color=FIRST_TIME, label="computed for the first time"),
        Patch(color=AGAIN, label="computed again, to the same result"),
    ]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    save(figure, __file__)


if __name__ == "__main__":
    main()
