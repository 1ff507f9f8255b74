"""p and q over each other: what both cover is accepted, what sticks out of p is drawn after a rejection.

python articles/figures/16_overlap.py      # writes 16_overlap.svg
"""

from drawing import bare, plt, save

TOKENS, P, Q = "ABC", (0.5, 0.3, 0.2), (0.2, 0.6, 0.2)
BOTH, LEFT, REJECTED = "#99d5c9", "#0f766e", "#fecaca"


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.4), width_ratios=(1.25, 1))
    # 1. Both distributions, and their parts.
    ax = axes[0]
    for x, (p, q) in enumerate(zip(P, Q, strict=True)):
        both = min(p, q)
        ax.bar(x, both, 0.62, color=BOTH)
        ax.text(x, both / 2, f"{both:.1f}\nstands", ha="center", va="center", fontsize=9)
        if p > q:
            ax.bar(x, p - q, 0.62, bottom=q, color=LEFT)
            ax.text(x, (p + q) / 2, f"{p - q:.1f}\nlacking", ha="center", va="center", fontsize=9, color="w")
        if q > p:
            ax.bar(x, q - p, 0.62, bottom=p, color=REJECTED, hatch="//", edgecolor="#b91c1c", lw=0)
            ax.text(x, (p + q) / 2, f"{q - p:.1f}\nrejected", ha="center", va="center", fontsize=9,
                    bbox={"facecolor": REJECTED, "edgecolor": "none", "pad": 1})  # fmt: skip
        ax.hlines(p, x - 0.36, x + 0.36, color="#334155", lw=2)
        ax.hlines(q, x - 0.36, x + 0.36, color="#b45309", lw=2, ls="--")
    ax.plot([], [], color="#334155", lw=2, label="p, the target's")
    ax.plot([], [], color="#b45309", lw=2, ls="--", label="q, the draft's")
    ax.legend(frameon=False, loc="upper right")
    ax.set_title("the draft is drawn from q", fontsize=10.5)
    ax.set_ylabel("probability")
    # 2. What was rejected is drawn where something is lacking.
    ax = axes[1]
    for x, (p, q) in enumerate(zip(P, Q, strict=True)):
        ax.bar(x, min(p, q), 0.62, color=BOTH)
        if p > q:
            ax.bar(x, p - q, 0.62, bottom=q, color=REJECTED, hatch="//", edgecolor="#b91c1c", lw=0)
            ax.text(x, (p + q) / 2, "drawn in B's\nplace", ha="center", va="center", fontsize=8.5,
                    bbox={"facecolor": REJECTED, "edgecolor": "none", "pad": 1})  # fmt: skip
        ax.hlines(p, x - 0.36, x + 0.36, color="#334155", lw=2)
    ax.set_title("the token has the distribution p", fontsize=10.5)
    for ax in axes:
        ax.set(xticks=range(3), xticklabels=TOKENS, ylim=(0, 0.66))
        bare(ax)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
