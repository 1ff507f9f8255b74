"""Two events as bytes, cut by the network at places of its own, put together again as lines and as events.

python articles/figures/14_wire.py      # writes 14_wire.svg beside this file
"""

from itertools import pairwise

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Rectangle

INK, GREY, RED = "#222222", "#666666", "#b91c1c"
PIECES = ("#fde68a", "#bfdbfe", "#bbf7d0")
WIRE = "data: é\r\n\r\ndata: [DONE]\r\n\r\n".encode()
CUTS = (7, 11)  # the first inside é, the second between CR and LF
NAMES = {10: "LF", 13: "CR", 32: "␣"}


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.6, 3.9))
    ax.set(xlim=(-0.2, len(WIRE) + 0.2), ylim=(-3.75, 2.1))
    ax.axis("off")
    bounds = (0, *CUTS, len(WIRE))
    for number, (start, end) in enumerate(pairwise(bounds), 1):
        for i in range(start, end):
            byte = WIRE[i]
            ax.add_patch(Rectangle((i, 0), 1, 0.9, facecolor=PIECES[number - 1], edgecolor=INK, lw=0.7))
            name = NAMES.get(byte) or (chr(byte) if byte < 128 else "")
            ax.text(i + 0.5, 0.62, name, ha="center", va="center", fontsize=9 if len(name) < 2 else 7)
            colour = RED if byte > 127 else GREY
            ax.text(i + 0.5, 0.24, f"{byte:02x}", ha="center", va="center", fontsize=7, color=colour)
        arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (start, 1.15), (end, 1.15), arrowprops=arrow)
        ax.text((start + end) / 2, 1.25, f"piece {number}: {end - start} bytes", ha="center", va="bottom")
    ax.text(0, 1.95, "what the socket gives", fontsize=9, color=GREY, va="center")
    arrow = {"arrowstyle": "->", "color": RED}
    for at, where, words in (
        (7, (5.9, -0.62), "é is two bytes, c3 and a9:\ncut in between"),
        (11, (12.3, -0.62), "CR and LF are one end of a line:\ncut in between"),
    ):
        align = "right" if where[0] < at else "left"
        ax.annotate(words, (at, 0), where, color=RED, fontsize=8.5, va="center", ha=align, arrowprops=arrow)
    text, at = WIRE.decode(), 0
    for line in text.split("\r\n")[:-1]:
        size = len(line.encode()) + 2
        words = line or "empty:\nthe event\nends"
        ax.add_patch(Rectangle((at + 0.05, -2.3), size - 0.1, 0.9, facecolor="white", edgecolor=INK, lw=0.9))
        ax.text(at + size / 2, -1.85, words, ha="center", va="center", fontsize=10 if line else 6)
        at += size
    ax.text(0, -1.2, "lines", fontsize=9, color=GREY, va="center")
    for start, end, words in (
        (0, 12, "event: é"),
        (12, len(WIRE), "event: [DONE], OpenAI's mark of the end"),
    ):
        box = Rectangle((start + 0.05, -3.6), end - start - 0.1, 0.9, facecolor="#f3f4f6", edgecolor=INK)
        ax.add_patch(box)
        ax.text((start + end) / 2, -3.15, words, ha="center", va="center", weight="bold")
    ax.text(0, -2.52, "events", fontsize=9, color=GREY, va="center")
    save(figure, __file__)


if __name__ == "__main__":
    main()
