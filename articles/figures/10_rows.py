"""Which row of logits speaks of which token: a prompt of five tokens, read in one go.

python articles/figures/10_rows.py      # writes 10_rows.svg beside this file
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

TOKENS = ["Once", " upon", " a", " time", ","]
BLUE, GRAY, GREEN = "#2563eb", "#94a3b8", "#15803d"
plt.rcParams.update({"svg.hashsalt": "10_rows", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.4, 3.1))
    for i, token in enumerate([*TOKENS, "?"]):
        chosen = i == len(TOKENS)
        colour = GREEN if chosen else GRAY if not i else BLUE
        ax.add_patch(plt.Rectangle((i + 0.06, 2), 0.88, 0.62, fc="white", ec=colour, lw=1.6))
        ax.text(i + 0.5, 2.31, token.replace(" ", "·"), ha="center", va="center", family="DejaVu Sans Mono")
        above = "to be chosen" if chosen else "no probability" if not i else "scored"
        ax.text(i + 0.5, 2.76, above, ha="center", color=colour, fontsize=9)
        ax.text(i + 0.5, 3.08, "output 0" if chosen else f"token {i}", ha="center", weight="bold")
        if chosen:
            continue
        ax.add_patch(plt.Rectangle((i + 0.06, 0.3), 0.88, 0.5, fc="#eff6ff", ec="#bfdbfe"))
        ax.text(i + 0.5, 0.55, f"row {i}", ha="center", va="center")
        ax.plot([i + 0.5, i + 0.5], [0.8, 2.0], color=GRAY, lw=1, ls=":")
        to = GREEN if i == len(TOKENS) - 1 else BLUE
        ax.annotate(
            "", (i + 1.36, 1.98), (i + 0.62, 0.82), arrowprops={"arrowstyle": "-|>", "color": to, "lw": 1.6}
        )
    ax.text(6.06, 0.55, "logits, [T, V]", va="center", color="#555555")
    ax.text(0.06, -0.05, "dotted: what the row has read last", color="#555555", fontsize=9)
    ax.text(2.9, -0.05, "arrow: the token it speaks of", color="#555555", fontsize=9)
    ax.set(xlim=(0, 7.3), ylim=(-0.25, 3.35))
    ax.axis("off")
    figure.tight_layout(pad=0.3)
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
