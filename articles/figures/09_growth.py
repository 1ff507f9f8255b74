"""Memory and time of one layer's attention against the length of the text, on a CPU and on an H200.

python articles/figures/09_growth.py    # writes 09_growth.svg, from the two part09 results
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COLOURS = {"eager": "#be123c", "tiled": "#b45309", "sdpa": "#1d4ed8", "triton": "#047857"}
plt.rcParams.update({"svg.hashsalt": "09_growth", "font.family": "DejaVu Sans", "font.size": 10})


def draw(
    ax: plt.Axes, lengths: list[int], series: dict[str, list[float | None]], unit: str, title: str
) -> None:
    for name, values in series.items():
        points = [(length, value) for length, value in zip(lengths, values, strict=True) if value is not None]
        ax.loglog(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[name], label=name)
    ax.set_xticks(lengths[:: 2 if len(lengths) > 6 else 1])
    ax.minorticks_off()
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.set(xlabel="tokens", ylabel=unit)
    ax.set_title(title, loc="left", weight="bold", fontsize=10)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    cpu = json.loads((RESULTS / "part09_growth.json").read_text())["figures"]
    gpu = json.loads((RESULTS / "part09_prefill_gpu.json").read_text())["figures"]["growth"]
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    by_length = cpu["by_length"]
    memory = {name: found["mb"] for name, found in by_length.items()}
    times = {name: [x * 1e3 for x in found["seconds"]] for name, found in by_length.items()}
    names = [name for name in COLOURS if name in gpu]
    draw(axes[0, 0], cpu["lengths"], memory, "MB beyond the inputs", "CPU: memory")
    draw(axes[0, 1], cpu["lengths"], times, "ms", "CPU: time")
    draw(axes[1, 0], gpu["lengths"], {n: gpu[n]["mb"] for n in names}, "MB beyond the inputs", "H200: memory")
    draw(axes[1, 1], gpu["lengths"], {n: gpu[n]["ms"] for n in names}, "ms", "H200: time")
    at = gpu["lengths"].index(8192)
    tiled, eager = gpu["tiled"]["ms"][at], gpu["eager"]["ms"]
    ends = max(i for i, ms in enumerate(eager) if ms is not None)
    note = {"textcoords": "offset points", "fontsize": 8.5, "color": "#334155"}
    axes[1, 1].annotate(
        f"{tiled / eager[at]:.0f} × eager",
        (8192, tiled), (8, 0), va="center", **note,
    )  # fmt: skip
    for ax, values, below in ((axes[1, 0], gpu["eager"]["mb"], True), (axes[1, 1], eager, False)):
        where = (gpu["lengths"][ends], values[ends])
        ax.plot(*where, "x", ms=9, mew=2, color=COLOURS["eager"])
        ax.annotate(
            "then out\nof memory", where, (8, -6 if below else 6), va="top" if below else "bottom", **note
        )
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
