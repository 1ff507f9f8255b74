"""Which program of the decode kernel reads which block: the memory, and the grid.

python articles/figures/13_programs.py    # writes 13_programs.svg, from part13_reads.json
"""

from drawing import plt, result, save
from matplotlib.patches import Rectangle

COLOURS = (
    ("#bae6fd", "#7dd3fc", "#38bdf8"),
    ("#fed7aa", "#fdba74", "#fb923c"),
    ("#bbf7d0", "#86efac", "#4ade80"),
)
INK, GREY, FREE = "#1f2937", "#64748b", "#f8fafc"
WIDE = 20


def box(ax, x: float, y: float, width: float, text: str, colour: str, size: float = 9) -> None:
    ax.add_patch(Rectangle((x, y), width, 0.8, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
    ax.text(x + width / 2, y + 0.4, text, ha="center", va="center", color=INK, fontsize=size)


def main() -> None:
    found = result("part13_reads")
    work, readers = found["workload"], found["figures"]["readers"]
    splits, lens, P = work["splits"], work["lens"], work["tokens_per_block"]
    figure, ax = plt.subplots(figsize=(10.4, 5.3))
    ax.text(0, 8.0, f"the memory: {work['blocks']} blocks of {P} tokens", color=INK, weight="bold")
    for block, programs in enumerate(readers):
        x, y = block % WIDE, 6.9 - block // WIDE * 1.3
        if not programs:
            box(ax, x + 0.04, y, 0.92, "", FREE)
        for sequence, part in programs:
            box(ax, x + 0.04, y, 0.92, f"{'abc'[sequence]} {part}", COLOURS[sequence][part])
        ax.text(x + 0.5, y - 0.27, str(block), ha="center", color=GREY, fontsize=7)
    ax.text(0, 4.35, f"the grid of one key head: 3 sequences × {splits} parts", color=INK, weight="bold")
    for sequence, length in enumerate(lens):
        y = 3.2 - sequence * 1.15
        ax.text(0, y + 0.4, f"{'abc'[sequence]}: {length} tokens", va="center", color=INK)
        for part in range(splits):
            blocks = [block for block, by in enumerate(readers) if [sequence, part] in by]
            x = 3 + part * 4.25
            if blocks:
                table = found["figures"]["tables"][sequence]
                ordered = [block for block in table if block in blocks]
                told = f"{part}: " + " ".join(map(str, ordered))
                box(ax, x, y, 4.05, told, COLOURS[sequence][part], 8.5)
            else:
                box(ax, x, y, 4.05, f"{part}: nothing to do", FREE, 8.5)
    ax.text(
        3,
        0.35,
        "program (key head, sequence, part): the blocks that it read, in the table's order",
        color=GREY,
    )
    ax.set(xlim=(-0.1, WIDE + 0.1), ylim=(0.1, 8.5))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
