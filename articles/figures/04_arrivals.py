"""When a reader sees how much of an answer: streamed, and in one piece.

python articles/figures/04_arrivals.py    # writes 04_arrivals.svg, from part04_server_overhead.json
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "part04_server_overhead.json"
plt.rcParams.update({"svg.hashsalt": "04_arrivals", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figures = json.loads(RESULT.read_text())["figures"]
    arrivals, whole, tokens = figures["arrivals_ms"], figures["first_ms_in_one_piece"], figures["new_tokens"]

    figure, ax = plt.subplots(figsize=(7.2, 3.6))
    ax.step([0, *arrivals], range(tokens + 1), where="post", color="#1d4ed8", label="streamed")
    ax.step([0, whole], [0, tokens], where="post", color="#b45309", label="in one piece")
    ax.set(xlabel="time since the request, ms", ylabel="tokens on the screen", xlim=(0, None), ylim=(0, None))
    ax.set_title("A stream begins at once", loc="left", weight="bold")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, loc="upper left")
    ax.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
