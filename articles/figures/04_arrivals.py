"""When a reader sees how much of an answer: streamed, and in one piece.

python articles/figures/04_arrivals.py    # writes 04_arrivals.svg, from part04_server_overhead.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save


def main() -> None:
    figures = result("part04_server_overhead")["figures"]
    arrivals, whole, tokens = figures["arrivals_ms"], figures["first_ms_in_one_piece"], figures["new_tokens"]

    figure, ax = plt.subplots(figsize=(7.2, 3.6))
    ax.step([0, *arrivals], range(tokens + 1), where="post", color="#1d4ed8", label="streamed")
    ax.step([0, whole], [0, tokens], where="post", color="#b45309", label="in one piece")
    ax.set(xlabel="time since the request, ms", ylabel="tokens on the screen", xlim=(0, None), ylim=(0, None))
    ax.set_title("A stream begins at once", loc="left", weight="bold")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, loc="upper left")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
