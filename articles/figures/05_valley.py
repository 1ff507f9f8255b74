"""Every setting of the knobs as a point: how much it repeats itself, and how many words are no words.

python articles/figures/05_valley.py     # writes 05_valley.svg beside this file, from part05_knobs.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part05_knobs.json"
COLOURS = {"greedy": "#2563eb", "temperature 0.7": "#15803d", "temperature 1": "#d97706"}
plt.rcParams.update({"svg.hashsalt": "05_valley", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figures = json.loads(RESULT.read_text())["figures"]
    names = list(figures)  # from cold to hot
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.9), sharey=True)
    for place, name in enumerate(names):
        base = name.partition(",")[0]
        colour = COLOURS.get(base, "#b91c1c")
        left.barh(place, figures[name]["repeats"] * 100, color=colour)
        right.barh(place, figures[name]["unknown_per_hundred"], color=colour)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set(xlabel="four-word runs told before, %", title="goes in circles")
    right.set(xlabel="unknown words in 100", title="talks gibberish")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", alpha=0.3)
    figure.suptitle("Too cold, and it repeats itself; too hot, and words fall apart", weight="bold")
    figure.tight_layout()
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
