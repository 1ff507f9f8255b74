"""A request's time: outputs of the engine, the deadline, and `end`, which moves it.

python articles/figures/15_deadline.py      # writes 15_deadline.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, save

BLUE, RED, GREY = "#2563eb", "#dc2626", "#666666"
# (what happens, seconds of the outputs, deadline, where `end` moves it or None, what the reader gets)
ROWS = [
    ("outputs in time", (1.2, 2.4, 3.6), 8.0, None, "each output as it comes"),
    ("the wait must end", (1.2, 2.4), 4.5, None, 'at 4.5: what it has, "abort"'),
    ("no token yet", (), 4.5, None, "at 4.5: 503, queue_timeout"),
    ("one lies ready, unread", (1.2, 4.2), 4.5, None, 'reads again at 5: the first, "abort"'),
    ("the server shuts down", (1.2, 2.4), 8.0, 3.4, 'at 3.4: what it has, "abort"'),
]


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.5))
    for row, (name, outputs, deadline, moved, gets) in enumerate(ROWS):
        y = -row
        ends = deadline if moved is None else moved
        last = 5.0 if row == 3 else min(ends, 8.0)
        ax.plot([0, last], [y, y], color="#cbd5e1", lw=5, solid_capstyle="butt", zorder=1)
        ax.plot(outputs, [y] * len(outputs), "o", color=BLUE, ms=7, zorder=3)
        if row == 3:
            ax.plot([4.2], [y], "o", mfc="white", mec=BLUE, ms=7, zorder=4)
        colour = "#f3b4b4" if moved else RED
        ax.plot([deadline] * 2, [y - 0.3, y + 0.3], color=colour, lw=2, zorder=2)
        if moved is not None:
            ax.plot([moved] * 2, [y - 0.3, y + 0.3], color=RED, lw=2, zorder=2)
            arrow = {"arrowstyle": "->", "color": RED, "lw": 1}
            ax.annotate("", (moved + 0.1, y + 0.2), (deadline - 0.1, y + 0.2), arrowprops=arrow)
            ax.text(5.7, y + 0.26, "end()", color=RED, fontsize=9, ha="center", va="bottom")
        ax.text(-0.2, y, name, ha="right", va="center")
        ax.text(8.4, y, gets, va="center", color=GREY, fontsize=9)
    ax.set(
        xlim=(0, 12.4),
        ylim=(-4.6, 0.8),
        yticks=[],
        xticks=range(9),
        xlabel="seconds since the request arrived",
    )
    ax.set_title(
        "● an output of the engine   ○ not given any more   | the deadline",
        loc="left",
        fontsize=9,
        color=GREY,
    )
    ax.xaxis.set_label_coords(0.33, -0.12)
    bare(ax, "left")
    save(figure, __file__)


if __name__ == "__main__":
    main()
