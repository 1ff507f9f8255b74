"""The finished engine: who asks whom, and which part brings what.

python articles/figures/20_engine.py      # writes 20_engine.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, GREY = "#222222", "#555555"
DOOR, ENGINE, MEMORY, MODEL, WATCH = "#dbeafe", "#d1fae5", "#fde68a", "#fbcfe8", "#e5e7eb"


def box(ax, x: float, y: float, width: float, height: float, colour: str, name: str, parts: str) -> None:
    """A box with its name, and below it what is in it, with the numbers of the parts."""
    shape = "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=colour, ec=INK, lw=0.9))
    ax.text(x + width / 2, y + height - 0.3, name, ha="center", va="center", fontsize=10, weight="bold")
    ax.text(
        x + width / 2, y + (height - 0.5) / 2, parts, ha="center", va="center", fontsize=8.5, linespacing=1.5
    )


def arrow(
    ax, start: tuple[float, float], end: tuple[float, float], says: str = "", side: float = 0.1
) -> None:
    """`says` stands beside an upright arrow and above a level one."""
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, lw=1.2, color=INK, shrinkA=0, shrinkB=0
        )
    )
    level = start[1] == end[1]
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    ax.text(x if level else x + side, y + 0.1 if level else y, says, fontsize=8.5, color=GREY,
            ha="center" if level else "left", va="bottom" if level else "center")  # fmt: skip


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.6, 6.9))
    ax.set(xlim=(-0.1, 13.3), ylim=(-0.1, 8.7))
    ax.axis("off")

    # 1. The doors.
    box(ax, 0.1, 7.3, 3.0, 1.3, DOOR, "your script", "LLM.generate, LLM.chat (20)\nruvon generate (20)")
    box(
        ax,
        4.1,
        7.3,
        4.6,
        1.3,
        DOOR,
        "HTTP server",
        "completions (4), scores (10), chat (14)\nadapters by name (18), cost (19)",
    )
    box(
        ax,
        9.7,
        7.3,
        3.5,
        1.3,
        WATCH,
        "pages and clients",
        "chat, terminal (14)\ndashboard, /metrics (11, 19)",
    )
    box(ax, 4.1, 5.75, 4.6, 1.0, DOOR, "admission", "room, deadlines, an end in order (15)")
    arrow(ax, (9.65, 7.95), (8.75, 7.95))
    arrow(ax, (6.4, 7.25), (6.4, 6.8))

    # 2. The engine's circle.
    frame = "round,pad=0.02,rounding_size=0.1"
    ax.add_patch(FancyBboxPatch((0, 3.05), 13.2, 2.25, boxstyle=frame, fc="#f8fafc", ec=GREY, ls=(0, (4, 3))))
    ax.text(
        6.6,
        5.05,
        "engine: one step after the other (6), or one ahead (13)",
        ha="center",
        va="center",
        fontsize=9,
        color=GREY,
    )
    box(
        ax,
        0.3,
        3.3,
        3.5,
        1.45,
        ENGINE,
        "scheduler",
        "who computes how many tokens?\nFIFO (6), static (7), continuous (8)",
    )
    box(
        ax,
        4.8,
        3.3,
        3.8,
        1.45,
        ENGINE,
        "executor",
        "forward pass, then sampler (5)\nscores (10), drafts (16), graphs (13)",
    )
    box(
        ax,
        9.7,
        3.3,
        3.3,
        1.45,
        ENGINE,
        "outputs",
        "tokens to text, stop checks (2)\nlisteners (6): metrics, bill (11, 19)",
    )
    arrow(ax, (3.85, 4.02), (4.75, 4.02), "batch")
    arrow(ax, (8.65, 4.02), (9.65, 4.02), "tokens")
    arrow(ax, (1.6, 7.25), (1.6, 5.35), "requests")
    arrow(ax, (5.4, 5.7), (5.4, 5.35), "requests")
    arrow(ax, (11.3, 5.35), (11.3, 7.25), "text, piece by piece")

    # 3. Memory and model.
    box(ax, 0.3, 0.1, 3.5, 1.9, MEMORY, "KV cache", "slots (6), pages (12)\nprefixes, swapping (12)")
    box(
        ax,
        4.8,
        0.1,
        3.8,
        1.9,
        MODEL,
        "model",
        "one flat row of tokens\nGPT-2 (1), Llama, Qwen3 (20)\nnever sees the memory",
    )
    box(ax, 9.7, 0.1, 3.3, 1.9, MODEL, "linear layers", "packed (3)\nint8, int4 (17)\nadapters by row (18)")
    arrow(ax, (2.05, 3.0), (2.05, 2.05), "admit, reserve,\ncommit, release")
    arrow(ax, (6.7, 3.0), (6.7, 2.05), "tokens, positions")
    arrow(ax, (3.85, 1.25), (4.75, 1.25), "attend")
    ax.text(4.3, 0.62, "tiles (9)\nTriton (13)", ha="center", va="center", fontsize=7.5, color=GREY)
    arrow(ax, (8.65, 1.05), (9.65, 1.05), "x")
    save(figure, __file__)


if __name__ == "__main__":
    main()
