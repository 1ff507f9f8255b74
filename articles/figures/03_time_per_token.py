"""Milliseconds for one more token against the length of the sequence, without a cache and with one.

python articles/figures/03_time_per_token.py    # writes 03_time_per_token.svg beside this file

Without: Part 2's measurement, part02_growth.json. With: part03_kv_cache.json.
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

NONE, CACHE, PACKED = "#b45309", "#0f766e", "#1d4ed8"


def line(ax: plt.Axes, lengths: list, times: list, colour: str, label: str, first: bool) -> None:
    """A curve with its last time written at it, and its first where there is room."""
    ax.plot(lengths, times, marker="o", ms=4, color=colour, label=label)
    for i in (0, -1) if first else (-1,):
        ax.annotate(
            f"{times[i]:.3g} ms", (lengths[i], times[i]), xytext=(0, 8), textcoords="offset points",
            ha="right" if i else "left", color=colour,
        )  # fmt: skip


def main() -> None:
    growth = result("part02_growth")["tables"]["growth"]["rows"]
    curve = result("part03_kv_cache")["figures"]["curve"]
    figure, (both, below) = plt.subplots(1, 2, figsize=(8.8, 3.7))
    line(both, [row[0] for row in growth], [row[1] for row in growth], NONE, "no cache (Part 2)", False)
    line(both, curve["length"], curve["cached_ms"], CACHE, "cache", False)
    line(below, curve["length"], curve["cached_ms"], CACHE, "cache", True)
    line(below, curve["length"], curve["packed_ms"], PACKED, "cache, packed weights", True)
    both.set_title("A step without a cache and with one", loc="left", weight="bold", fontsize=10)
    for ax in (both, below):
        ax.set(xlabel="tokens so far", ylabel="time for one more token, ms", xlim=(0, 1050))
        ax.set_ylim(0, 1.15 * max(max(drawn.get_ydata()) for drawn in ax.lines))
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
        bare(ax)
    scale = both.get_ylim()[1] / below.get_ylim()[1]
    below.set_title(f"The lower curve, {scale:.0f} times enlarged", loc="left", weight="bold", fontsize=10)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
