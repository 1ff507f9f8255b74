"""Two memories of a GPU, and what eager attention and the Triton kernel move through the slow one.

python articles/figures/09_passes.py    # writes 09_passes.svg, from part09_reckoned
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "part09_reckoned.json"
RED, GREEN, INK, GREY = "#be123c", "#047857", "#334155", "#94a3b8"
plt.rcParams.update({"svg.hashsalt": "09_passes", "font.family": "DejaVu Sans", "font.size": 9.5})


def memories(ax: plt.Axes) -> None:
    """A small fast memory beside the arithmetic, and a large slow one below."""
    for y, height, width, colour, words in (
        (
            2.1,
            1.3,
            2.6,
            GREEN,
            "on the chip (SRAM)\na program's tile:\n228 KB for each of\n132 processors",
        ),
        (
            0.0,
            1.1,
            4.2,
            RED,
            "main memory (HBM)\n141 GB: q, k, v, out, and eager's scores\na few TB/s for everybody",
        ),
    ):
        box = FancyBboxPatch(
            (-width / 2, y),
            width,
            height,
            boxstyle="round,pad=0.08",
            facecolor="white",
            edgecolor=colour,
            lw=1.6,
        )
        ax.add_patch(box)
        ax.text(0, y + height / 2, words, ha="center", va="center", color=INK, linespacing=1.4)
    ax.annotate("", (-0.35, 2.0), (-0.35, 1.2), arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.6})
    ax.annotate("", (0.35, 1.2), (0.35, 2.0), arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.6})
    ax.text(0.55, 1.6, "each arrow takes time", va="center", color=INK)
    ax.set(xlim=(-2.4, 2.6), ylim=(-0.3, 3.7))
    ax.set_title("Two memories", loc="left", weight="bold", fontsize=10)
    ax.axis("off")


def passes(ax: plt.Axes, figures: dict) -> None:
    """GB that each kernel moves, pass by pass."""
    left = 0.0
    for i, name in enumerate(figures["passes"]):
        ax.barh(
            1, figures["scores_gb"], left=left, color=RED, alpha=0.85 if i % 2 else 0.6, edgecolor="white"
        )
        middle = left + figures["scores_gb"] / 2
        ax.text(middle, 1, name.replace(" ", "\n"), ha="center", va="center", color="white", fontsize=8.5)
        left += figures["scores_gb"]
    once = figures["queries_and_results_mb"] / 1e3
    again = figures["triton_key_gb"]
    ax.barh(0, once, color=GREEN, edgecolor=GREEN)
    ax.barh(0, again, left=once, color="white", edgecolor=GREEN, hatch="///")
    words = (
        f"queries and results once ({once:.2f} GB); hatched: keys and values again for each\n"
        f"tile of queries, mostly from a cache: they are {figures['keys_and_values_mb']:.0f} MB in all"
    )
    ax.text(once + again + 0.15, 0, words, va="center", color=INK, fontsize=8.5)
    ms = figures["ms"]
    ax.set_yticks([1, 0], [f"eager\n{ms['eager']:.2f} ms", f"triton\n{ms['triton']:.2f} ms"])
    ax.set(
        xlabel="GB moved for one layer, 8,192 tokens, 16 heads of 64 in bf16",
        xlim=(0, 13.2),
        ylim=(-0.6, 1.6),
    )
    ax.set_title("Who passes over the table of scores", loc="left", weight="bold", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figures = json.loads(RECORD.read_text())["figures"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained", height_ratios=(1.15, 1))
    memories(axes[0])
    passes(axes[1], figures)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
