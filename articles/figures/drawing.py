"""What the scripts in this folder share: fonts, plain axes, reading of results, the same file on each run."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})


def result(name: str) -> dict:
    """What benchmarks/NAME.py has written."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def bare(ax: plt.Axes, *more: str) -> None:
    """No frame at the top and on the right, nor where `more` says."""
    ax.spines[["top", "right", *more]].set_visible(False)


def save(figure: plt.Figure, script: str, tight: bool = True) -> None:
    """Write the figure beside its script, as SVG; `tight` cuts the margin off."""
    target = Path(script).with_suffix(".svg")
    plt.rcParams["svg.hashsalt"] = target.stem  # else the names inside differ from run to run
    figure.savefig(target, bbox_inches="tight" if tight else None, metadata={"Date": None})
    print(target.name)
