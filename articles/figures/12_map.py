"""Whose is which slot and which block, step by step, and how much memory is set aside for nothing.

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


ASIDE = 20  # added to a request's number where its slot holds nothing


def slots_as_blocks(steps: list[str], blocks: int, block_size: int) -> np.ndarray:
    """[B, steps]: what the slots of each step would be as blocks: a request's number, and ASIDE more where
    its slot holds nothing.
    """
    owners = np.full((blocks, len(steps)), -1)
    for at, step in enumerate(steps):
        slots = [tuple(map(int, slot.split(":"))) for slot in step.split(",")]
        size = blocks // len(slots)
        for number, (owner, tokens) in enumerate(slots):
            if owner >= 0:
                first, filled = number * size, -(-tokens // block_size)
                owners[first : first + size, at] = owner + ASIDE
                owners[first : first + filled, at] = owner
    return owners


def draw(ax: plt.Axes, owners: np.ndarray) -> None:
    """A column for each second step, a row for each block."""
    colours = np.array(plt.get_cmap("tab20").colors)
    pale = 0.75 + 0.25 * colours
    shown = owners + 2  # kept 0, free 1, the requests, and what is set aside for them
    ax.imshow(
        shown, aspect="auto", interpolation="nearest", vmin=0, vmax=41,
        cmap=ListedColormap(["#e2e8f0", "white", *colours, *pale]),
        extent=(0, 2 * owners.shape[1], len(shown), 0),
    )  # fmt: skip
    ax.set(ylabel="block")


def main() -> None:
    result = json.loads(RESULT.read_text())
    figures, room = result["figures"], result["workload"]["blocks"] * result["workload"]["block_size"]
    blocks = result["workload"]["blocks"]
    pages = np.array([[int(number) for number in row.split(",")] for row in figures["map"]]).T  # [B, steps]
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9.6, 8.6), layout="constrained", height_ratios=[1.3, 1.3, 1], sharex=True
    )
    draw(top, slots_as_blocks(figures["slots_map"], blocks, result["workload"]["block_size"]))
    top.set_title(
        "slots: each colour is a request, what is pale is set aside and holds nothing", loc="left",
        fontsize=10.5,
    )  # fmt: skip
    draw(middle, pages)
    middle.set_title(
        "pages, in the same memory: white is free, grey is free and can still be found", loc="left",
        fontsize=10.5,
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
    bottom.legend(frameon=False, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.62), fontsize=9)
    bottom.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
