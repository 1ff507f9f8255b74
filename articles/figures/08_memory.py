"""Tokens in a cache that is too small, step by step: newcomers let in for a chunk, and for all they have.

python articles/figures/08_memory.py    # writes 08_memory.svg, from part08_gantt.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

TITLES = {
    "hasty": "let in for its first chunk: B is thrown out {times} times, and {lost} computed tokens are lost",
    "patient": "let in for all that is known: B is thrown out once, and {lost} computed tokens are lost",
}
# Requests; none has the colours that 08_gantt gives to prompt and output.
COLOURS, INK = ("#1d4ed8", "#be185d", "#ca8a04", "#7c3aed", "#65a30d"), "#334155"


def main() -> None:
    found = result("part08_gantt")
    names, room = [entry[0] for entry in found["workload"]["scene"]], found["workload"]["room"]
    figure, axes = plt.subplots(2, 1, figsize=(9.6, 5.2), sharex=True, layout="constrained")
    for ax, (kind, title) in zip(axes, TITLES.items(), strict=True):
        seen = found["figures"][kind]
        base = [0] * len(seen["held"])
        steps = range(1, len(base) + 1)
        for name, colour in zip(names, COLOURS, strict=True):
            tokens = [held.get(name, 0) for held in seen["held"]]
            ax.bar(steps, tokens, width=1, bottom=base, color=colour, label=name, alpha=0.85)
            base = [below + own for below, own in zip(base, tokens, strict=True)]
        ax.axhline(room, color=INK, ls="--", lw=1)
        ax.text(len(base), room + 1, f"all the room there is: {room} tokens", ha="right", va="bottom")
        ax.set(ylabel="tokens in the cache", ylim=(0, room * 1.2), xlim=(0.5, len(base) + 0.5))
        ax.set_title(title.format(times=seen["preemptions"], lost=seen["lost"]), loc="left", fontsize=10.5)
        bare(ax)
    axes[-1].set(xlabel="step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save(figure, __file__)


if __name__ == "__main__":
    main()
