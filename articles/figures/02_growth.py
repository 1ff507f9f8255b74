"""Milliseconds for the next token against the length of the sequence, without a cache.

python articles/figures/02_growth.py    # writes 02_growth.svg beside this file, from part02_growth.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part02_growth.json"
plt.rcParams.update({"svg.hashsalt": "02_growth", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    measured = json.loads(RESULT.read_text())
    lengths, _, milliseconds, _ = zip(*measured["tables"]["growth"]["rows"], strict=True)
    base = measured["figures"]["base"]  # tokens: the proportional line goes through this measurement
    per_token = milliseconds[lengths.index(base)] / base

    figure, ax = plt.subplots(figsize=(7.2, 3.8))
    ax.plot(lengths, milliseconds, marker="o", color="#b45309", label="measured")
    ax.plot(
        [0, lengths[-1]], [0, lengths[-1] * per_token], ls="--", color="#555555",
        label=f"in proportion to T, from T = {base}",
    )  # fmt: skip
    ax.set(xlabel="tokens so far, T", ylabel="time for the next token, ms", xlim=(0, None), ylim=(0, None))
    ax.set_title("Every token is dearer than the one before", loc="left", weight="bold")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
