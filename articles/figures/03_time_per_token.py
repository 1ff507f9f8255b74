"""Milliseconds for one more token against the length of the sequence, without and with a cache.

python articles/figures/03_time_per_token.py    # writes 03_time_per_token.svg, from part03_kv_cache.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part03_kv_cache.json"
plt.rcParams.update({"svg.hashsalt": "03_time_per_token", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    curve = json.loads(RESULT.read_text())["figures"]["curve"]
    figure, ax = plt.subplots(figsize=(7.2, 3.8))
    for key, label, colour in (
        ("full_ms", "no cache (Part 2)", "#b45309"),
        ("cached_ms", "cache (Part 3)", "#0f766e"),
    ):
        ax.plot(curve["length"], curve[key], marker="o", color=colour, label=label)
        ax.annotate(
            f"{curve[key][-1]:.3g} ms", (curve["length"][-1], curve[key][-1]), xytext=(0, 7),
            textcoords="offset points", ha="right", color=colour,
        )  # fmt: skip
    ax.set(xlabel="tokens so far", ylabel="time for one more token, ms", xlim=(0, None), ylim=(0, None))
    ax.margins(y=0.12)
    ax.set_title("With a cache, the length hardly matters", loc="left", weight="bold")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
