"""What each step of writing the kernel gains, beside the time that a copy of the same bytes takes.

python articles/figures/13_steps.py    # writes 13_steps.svg, from part13_steps.json
"""

from drawing import bare, plt, result, save

NAMES = {
    "gather": "gather, PyTorch",
    "two_passes": "two passes",
    "one_pass": "one pass",
    "tiles": "tiles of 64",
    "packed": "tl.dot",
    "split": "split-K",
}
WORK = {"s64x512": "64 × 512", "s256x1024": "256 × 1,024", "s1x8192": "1 × 8,192"}
COLOURS = ("#0284c7", "#f97316", "#16a34a")


def main() -> None:
    us = result("part13_steps")["figures"]["attention"]["gpt2_xl"]["us"]
    alone = result("part13_decode_attention")["figures"]
    figure, ax = plt.subplots(figsize=(9.4, 4.4), layout="constrained")
    for (work, label), colour in zip(WORK.items(), COLOURS, strict=True):
        times = [us[step][work] for step in NAMES]
        ax.plot(range(len(NAMES)), times, "o-", color=colour, label=label)
        copy = alone["gpt2_xl"][work]["bytes"] / alone["copy_terabytes_per_second"] / 1e6
        ax.axhline(copy, color=colour, ls=":", lw=1.2)
        ax.text(5.12, copy, f"copy: {copy:.0f} µs", va="bottom", color=colour, fontsize=9)
    ax.set_yscale("log")
    ax.set_xticks(range(len(NAMES)), NAMES.values())
    ax.set(ylabel="µs, one layer's attention", xlim=(-0.3, 6.0))
    ax.legend(title="sequences × tokens", frameon=False, loc="upper right")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
