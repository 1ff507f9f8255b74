"""What an output token costs by load: the whole bill, and the part of it that requests pay.

python articles/figures/19_load.py      # writes 19_load.svg, from part19_utilisation.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

API = 1.60  # dollars for a million output tokens elsewhere: supposed, as in the demo
BLUE, ORANGE, GREY = "#1d4ed8", "#b45309", "#666666"


def main() -> None:
    figures = result("part19_utilisation")["figures"]
    points = figures["points"]
    tokens = [point["output_tokens"] / point["seconds"] for point in points]
    whole = [point["dollars_per_million_output"] for point in points]
    paid = [point["dollars_per_million_output_paid"] for point in points]
    figure, ax = plt.subplots(figsize=(8.6, 4.2))
    ax.plot(tokens, whole, "o-", color=BLUE, label="the whole bill, by its output tokens")
    ax.plot(tokens, paid, "o-", color=ORANGE, label="what requests pay for their output tokens")
    ax.fill_between(tokens, paid, whole, color=BLUE, alpha=0.08, lw=0)
    ax.axhline(API, color=GREY, lw=1, ls="--")
    ax.annotate(f"an API at ${API:.2f} a million", (tokens[-1], API), (0, 5), textcoords="offset points",
                fontsize=8.5, color=GREY, ha="right")  # fmt: skip
    following = [*tokens[1:], float("inf")]
    for point, x, y, right in zip(points, tokens, whole, following, strict=True):
        if right < 1.08 * x:  # its words would lie on the next one's
            continue
        words = f"{point['used']:.0%}"
        ax.annotate(words, (x, y), (4, 6), textcoords="offset points", fontsize=8.5, color=GREY)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="output tokens per second",
        ylabel="dollars per million output tokens",
    )
    ax.set_title(
        "Beside the points: the share of the time that requests pay for", loc="left", fontsize=9, color=GREY
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.grid(alpha=0.3, which="both")
    ax.legend(frameon=False)
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
