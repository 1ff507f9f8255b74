"""Draws site/card.png, the picture that previews of links to the site show: 1,200 by 630 pixels.

    python tools/draw_card.py

The columns are README's chart: tokens per second after each part (articles/figures/20_rise.py).
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PAPER, INK, SOFT, COLUMN = "#0e1217", "#e8edf3", "#9aa6b4", "#8ab4ff"


def main() -> None:
    result = json.loads((ROOT / "benchmarks/results/compare_gpt2.json").read_text(encoding="utf-8"))
    speeds: dict[str, float] = {}  # "Part 3" -> its last
    for whose, what, rate, _ in result["tables"]["race"]["rows"]:
        if whose == "this engine":
            speeds[what.partition(":")[0]] = rate
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor=PAPER)
    figure.text(0.06, 0.76, "ruvon", color=INK, fontsize=64, weight="bold")
    figure.text(0.06, 0.63, "How does an LLM inference engine really work?", color=INK, fontsize=26)
    about = "Twenty parts, from bytes to a server.\nArticles, notebooks, exercises, tests."
    figure.text(0.06, 0.44, about, color=SOFT, fontsize=20, linespacing=1.6)
    ax = figure.add_axes((0.56, 0.08, 0.4, 0.5), facecolor=PAPER)
    ax.bar(list(speeds), list(speeds.values()), color=COLUMN, width=0.6)
    ax.spines[:].set_visible(False)
    ax.tick_params(colors=SOFT, length=0, labelsize=11)
    ax.set_yticks([])
    figure.savefig(ROOT / "site" / "card.png", facecolor=PAPER)


if __name__ == "__main__":
    main()
