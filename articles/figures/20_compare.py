"""The whole series in one chart: tokens per second of each capability, from benchmarks/compare.py.

python articles/figures/20_compare.py      # a panel for each model that was measured
"""

import matplotlib.pyplot as plt
from drawing import RESULTS, bare, result, save

NAMES = {
    "compare_storyteller": "storyteller, 6 million weights",
    "compare_gpt2": "GPT-2's shape, 124 million weights",
}
found = {title: result(name) for name, title in NAMES.items() if (RESULTS / f"{name}.json").exists()}
figure, panels = plt.subplots(len(found), figsize=(8.4, 4.4 * len(found)), squeeze=False)
for ax, (title, content) in zip(panels[:, 0], found.items(), strict=True):
    rows = content["tables"]["race"]["rows"][::-1]
    colours = ["#b8b8b8" if whose == "Hugging Face" else "#2a6fbb" for whose, *_ in rows]
    bars = ax.barh([f"{whose}: {what}" if whose == "Hugging Face" else what for whose, what, *_ in rows],
                   [row[2] for row in rows], color=colours)  # fmt: skip
    ax.bar_label(bars, [f"{rate:,.0f}   ×{ratio:.2g}" for *_, rate, ratio in rows], padding=4, fontsize=9)
    ax.set_xlabel(f"output tokens per second, {title}, one thread; × generate, one by one")
    ax.margins(x=0.16)
    ax.tick_params(axis="y", length=0)
    bare(ax)
figure.tight_layout()
save(figure, __file__)
