"""Whose is which block, step by step, and how much memory is set aside for nothing.

python articles/figures/12_map.py    # writes 12_map.svg, from part12_blocks.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part12_blocks.json"
INK = "#334155"
plt.rcParams.update({"svg.hashsalt": "12_map", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    result = json.loads(RESULT.read_text())
    figures, room = result["figures"], result["workload"]["blocks"] * result["workload"]["block_size"]
    owners = np.array([[int(number) for number in row.split(",")] for row in figures["map"]]).T  # [B, steps]
    shown = owners + 2  # kept 0, free 1, then the requests
    colours = ["#e2e8f0", "white", *plt.get_cmap("tab20").colors]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9.6, 6.4), layout="constrained", height_ratios=[1.5, 1], sharex=True
    )
    steps = 2 * owners.shape[1]
    top.imshow(
        shown, aspect="auto", interpolation="nearest", cmap=ListedColormap(colours), vmin=0, vmax=21,
        extent=(0, steps, len(shown), 0),
    )  # fmt: skip
    top.set(ylabel="block")
    top.set_title(
        "pages: each colour is a request, white is free, grey is free and can still be found",
        loc="left", fontsize=10.5,
    )  # fmt: skip
    tokens = figures["tokens"]
    for known, held, name, colour in (
        (tokens["slots_known"], tokens["slots"], "slots", "#b45309"),
        (tokens["known"], tokens["paged"], "pages", "#0f766e"),
    ):
        bottom.plot(held, color=colour, lw=1, label=f"{name}: set aside")
        bottom.plot(known, color=colour, lw=2.2, ls=":", label=f"{name}: in use")
    bottom.axhline(room, color=INK, ls="--", lw=0.8)
    bottom.set(xlabel="step", ylabel="tokens", ylim=(0, room * 1.1), xlim=(0, len(tokens["slots"])))
    bottom.legend(frameon=False, ncols=2, loc="center right", fontsize=9)
    bottom.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
