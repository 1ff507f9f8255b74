"""The whole series in one chart: tokens per second of each capability, from benchmarks/compare.py and
benchmarks/compare_gpu.py.

python articles/figures/20_compare.py      # a panel for each model that was measured
"""

import matplotlib.pyplot as plt
from drawing import RESULTS, bare, result, save

NAMES = {
    "compare_storyteller": "storyteller, 6 million weights, one CPU thread",
    "compare_gpt2": "GPT-2's shape, 124 million weights, one CPU thread",
    "compare_gpt2_xl": "GPT-2 XL's shape, 1.6 billion weights, one H200",
    "compare_qwen3_0_6b": "Qwen3-0.6B's shape, one H200",
}


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


found = {title: result(name) for name, title in NAMES.items() if (RESULTS / f"{name}.json").exists()}
columns = 1 if len(found) < 3 else 2
rows = -(-len(found) // columns)
figure, panels = plt.subplots(rows, columns, figsize=(8.4 * columns, 4.4 * rows), squeeze=False)
for ax in panels.flat[len(found) :]:
    ax.set_axis_off()
for ax, (title, content) in zip(panels.flat, found.items(), strict=False):
    race = content["tables"]["race"]["rows"][::-1]
    colours = ["#b8b8b8" if whose == "Hugging Face" else "#2a6fbb" for whose, *_ in race]
    bars = ax.barh([f"{whose}: {what}" if whose == "Hugging Face" else what for whose, what, *_ in race],
                   [row[2] for row in race], color=colours)  # fmt: skip
    ax.bar_label(bars, [f"{rate:,.0f}   ×{times(ratio)}" for *_, rate, ratio in race], padding=4, fontsize=9)
    ax.set_xlabel(f"output tokens per second, {title}; × generate, one by one")
    ax.margins(x=0.16)
    ax.tick_params(axis="y", length=0)
    bare(ax)
figure.tight_layout()
save(figure, __file__)
