"""What a decode step costs as more sequences share it: linear layers, and the rest.

python articles/figures/07_crowd.py    # writes 07_crowd.svg, from part07_batching.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part07_batching.json"
SHARED, OWN, INK = "#1d4ed8", "#b45309", "#334155"
plt.rcParams.update({"svg.hashsalt": "07_crowd", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figures = json.loads(RESULT.read_text())["figures"]
    crowds, whole, linear = figures["crowds"], figures["crowd_step_ms"], figures["crowd_linear_ms"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.fill_between(crowds, linear, color=SHARED, alpha=0.75, label="linear layers: the weights, shared")
    left.fill_between(crowds, linear, whole, color=OWN, alpha=0.55, label="the rest: attention and overhead")
    left.plot(crowds, [whole[0] * s for s in crowds], ":", color=INK, label="if nothing were shared")
    left.set(ylabel="time of one decode step, ms", xlim=(1, crowds[-1]), ylim=(0, whole[-1] * 1.35))
    left.set_title("A step grows slower than the crowd ...", loc="left", weight="bold")
    left.legend(loc="upper left", framealpha=1, edgecolor="none")
    right.plot(crowds, [ms / s for s, ms in zip(crowds, whole, strict=True)], "o-", color=INK)
    right.set(ylabel="time per token, ms", ylim=(0, None))
    right.set_title("... so each token is cheaper", loc="left", weight="bold")
    for ax in (left, right):
        ax.set(xlabel="sequences in the step")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
