"""Two threads: an event loop that only moves messages, and an engine that goes round its step.

python articles/figures/06_threads.py      # writes 06_threads.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, GREY = "#222222", "#666666"
LOOP, ENGINE, QUEUE, FREE = "#dbeafe", "#d1fae5", "#fde68a", "#ffffff"
MONO = "DejaVu Sans Mono"


def box(ax, x: float, y: float, width: float, height: float, colour: str, text: str = "", **style) -> None:
    shape = "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=colour, ec=INK, lw=0.9))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", **{"fontsize": 9} | style)


def arrow(ax, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, lw=1.2, color=INK,
            connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.4, 5.6))
    ax.set(xlim=(-0.2, 13.4), ylim=(-0.3, 7.0))
    ax.axis("off")
    for x, width, title in (
        (-0.1, 3.2, "event loop: serves clients"),
        (6.3, 7.0, "engine's thread: goes in a circle"),
    ):
        frame = FancyBboxPatch(
            (x, 0),
            width,
            6.2,
            boxstyle="round,pad=0.02,rounding_size=0.1",
            fc="#f8fafc",
            ec=GREY,
            ls=(0, (4, 3)),
        )
        ax.add_patch(frame)
        ax.text(x + width / 2, 6.5, title, ha="center", va="center", weight="bold")

    # 1. Clients, and what passes between the threads.
    box(ax, 0.3, 4.9, 2.4, 0.7, LOOP, "HTTP server (Part 4)")
    box(ax, 3.7, 4.9, 2.1, 0.7, QUEUE, "abort B")
    ax.text(4.75, 5.75, "commands", ha="center", fontsize=9, color=GREY)
    arrow(ax, (2.75, 5.25), (3.65, 5.25))
    arrow(ax, (5.85, 5.25), (6.75, 5.25))
    for i, name in enumerate("ABC"):
        y = 2.9 - 1.0 * i
        box(ax, 0.3, y, 2.4, 0.7, LOOP, f"generate({name})", family=MONO)
        box(ax, 3.7, y, 2.1, 0.7, FREE if i else QUEUE, "empty" if i else "A: “, there was”")
        arrow(ax, (3.65, y + 0.35), (2.75, y + 0.35))
    ax.text(4.75, 4.12, "mailboxes", ha="center", fontsize=9, color=GREY)
    ax.text(4.75, 3.8, "(the latest output)", ha="center", fontsize=8, color=GREY)

    # 2. The circle.
    steps = (
        (6.8, 4.9, "take in commands"),
        (10.1, 4.9, "schedule → Batch"),
        (10.1, 3.6, "forward pass, sampler"),
        (10.1, 2.3, "append, stop checks"),
        (6.8, 2.3, "update, end the finished"),
        (6.8, 3.6, "outputs"),
    )
    for x, y, text in steps:
        box(ax, x, y, 2.9, 0.7, ENGINE, text)
    arrow(ax, (9.75, 5.25), (10.05, 5.25))
    arrow(ax, (11.55, 4.85), (11.55, 4.35))
    arrow(ax, (11.55, 3.55), (11.55, 3.05))
    arrow(ax, (10.05, 2.65), (9.75, 2.65))
    arrow(ax, (8.25, 3.05), (8.25, 3.55))
    arrow(ax, (8.25, 4.35), (8.25, 4.85))
    arrow(ax, (6.75, 3.8), (5.85, 3.35))

    # 3. What the scheduler owns.
    ax.text(6.8, 1.55, "waiting", fontsize=9, color=GREY)
    ax.text(9.0, 1.55, "running", fontsize=9, color=GREY)
    ax.text(11.0, 1.55, "has the buffer", fontsize=9, color=GREY)
    for x, text, colour in (
        (6.8, "B", LOOP),
        (7.6, "C", LOOP),
        (9.0, "A", ENGINE),
        (11.0, "A", ENGINE),
    ):
        box(ax, x, 0.6, 0.65, 0.7, colour, text, weight="bold")
    save(figure, __file__)


if __name__ == "__main__":
    main()
