"""Tokens in a cache that is too small, step by step: newcomers let in for a chunk, and for all they have.

python articles/figures/08_memory.py    # writes 08_memory.svg, from part08_gantt.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part08_gantt.json"
TITLES = {
    "hasty": "let in for its first chunk: B is thrown out {times} times, and {lost} computed tokens are lost",
    "patient": "let in for all that is known: B is thrown out once, and {lost} computed tokens are lost",
}
COLOURS, INK = ("#b45309", "#0f766e", "#2563eb", "#a21caf", "#ca8a04"), "#334155"
plt.rcParams.update({"svg.hashsalt": "08_memory", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    result = json.loads(RESULT.read_text())
    names, room = [entry[0] for entry in result["workload"]["scene"]], result["workload"]["room"]
    figure, axes = plt.subplots(2, 1, figsize=(9.6, 5.2), sharex=True, layout="constrained")
    for ax, (kind, title) in zip(axes, TITLES.items(), strict=True):
        found = result["figures"][kind]
        base = [0] * len(found["held"])
        steps = range(1, len(base) + 1)
        for name, colour in zip(names, COLOURS, strict=True):
            tokens = [held.get(name, 0) for held in found["held"]]
            ax.bar(steps, tokens, width=1, bottom=base, color=colour, label=name, alpha=0.85)
            base = [below + own for below, own in zip(base, tokens, strict=True)]
        ax.axhline(room, color=INK, ls="--", lw=1)
        ax.text(len(base), room + 1, f"all the room there is: {room} tokens", ha="right", va="bottom")
        ax.set(ylabel="tokens in the cache", ylim=(0, room * 1.2), xlim=(0.5, len(base) + 0.5))
        ax.set_title(title.format(times=found["preemptions"], lost=found["lost"]), loc="left", fontsize=10.5)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set(xlabel="step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
