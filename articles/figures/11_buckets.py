"""Ten waits, the counts that a histogram keeps of them, and the 95th percentile read back.

python articles/figures/11_buckets.py      # writes 11_buckets.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK, GREY, BLUE, FILL, RED = "#222222", "#666666", "#1d4ed8", "#dbeafe", "#b91c1c"
WAITS = (30, 50, 50, 70, 90, 200, 200, 220, 300, 400)  # ms
BOUNDS = (60, 100, 250, 500)  # ms
plt.rcParams.update({"svg.hashsalt": "11_buckets", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figure, (above, ax) = plt.subplots(
        2, 1, figsize=(9.2, 5.2), sharex=True, gridspec_kw={"height_ratios": [1, 3.4], "hspace": 0.08}
    )
    seen: dict[int, int] = {}
    for wait in WAITS:
        above.plot(wait, seen.get(wait, 0), "o", color=INK, ms=6)
        seen[wait] = seen.get(wait, 0) + 1
    above.set(ylim=(-0.7, 2.2), yticks=[])
    above.text(6, 1.35, "the waits themselves", fontsize=9, color=GREY)
    edges, counts = (0, *BOUNDS), [0, *(sum(wait <= bound for wait in WAITS) for bound in BOUNDS)]
    for left, right, below, count in zip(edges, edges[1:], counts, counts[1:], strict=False):
        ax.bar((left + right) / 2, count, width=right - left, color=FILL, edgecolor="#93c5fd", lw=1)
        words = f"{count - below}\nin here"
        ax.text((left + right) / 2, 0.2, words, ha="center", va="bottom", fontsize=8.5, color=GREY)
    ax.plot(edges, counts, "-o", color=BLUE, lw=1.6, ms=5)
    ax.text(
        262,
        7.75,
        "the counts that are kept (dots),\ntaken to grow evenly in between",
        color=BLUE,
        fontsize=9,
        va="top",
    )
    ax.plot([0, 437.5, 437.5], [9.5, 9.5, 0], "--", color=RED, lw=1.4)
    ax.plot(437.5, 9.5, "o", color=RED, ms=6)
    ax.text(6, 9.6, "rank 0.95 · 10 = 9.5", color=RED, fontsize=9, va="bottom")
    ax.text(442, 4.6, "estimate\n437.5 ms", color=RED, fontsize=9, ha="left")
    ax.annotate("largest wait\n400 ms", (400, 0), (352, 4.4), color=INK, fontsize=9, ha="center",
                arrowprops={"arrowstyle": "->", "color": INK})  # fmt: skip
    ax.set(xlim=(0, 510), ylim=(0, 10.9), xlabel="milliseconds", ylabel="waits of at most so much")
    ax.set_xticks(edges)
    for one in (above, ax):
        for side in ("right", "top"):
            one.spines[side].set_visible(False)
    above.spines["left"].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
