"""What users feel and what the server gets done, against how many ask at once.

python articles/figures/15_concurrency.py      # writes 15_concurrency.svg, from part15_concurrency.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save
from matplotlib.ticker import FuncFormatter, NullFormatter

COLOURS = {"FIFO": "#b45309", "static": "#64748b", "continuous": "#0f766e"}
PANELS = {
    "ttft_p50": ("first word, median", 1e-3, "seconds"),
    "e2e_p50": ("whole answer, median", 1e-3, "seconds"),
    "tokens_per_second": ("the server's work", 1.0, "tokens a second"),
}


def main() -> None:
    found = result("part15_concurrency")
    points, seats = found["figures"]["points"], found["workload"]["seats"]
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 3.5), layout="constrained")
    for ax, (key, (title, unit, label)) in zip(axes, PANELS.items(), strict=True):
        for name, colour in COLOURS.items():
            users = [point["users"] for point in points[name]]
            values = [point[key] * unit for point in points[name]]
            ax.plot(users, values, "o-", color=colour, ms=3.5, lw=1.6, label=name)
        ax.axvline(seats, color="#94a3b8", ls=":", lw=1)
        ax.set_xscale("log", base=2)
        ax.set_xticks(users, users)
        if unit != 1.0:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_ylim(bottom=0)
        ax.set_title(title, loc="left", weight="bold", fontsize=10.5)
        ax.set(xlabel="users at once", ylabel=label)
        bare(ax)
    axes[0].legend(frameon=False)
    axes[2].annotate(
        f"{seats} seats", (seats, 0), xytext=(4, 4), textcoords="offset points", fontsize=8.5, color="#64748b"
    )
    save(figure, __file__)


if __name__ == "__main__":
    main()
