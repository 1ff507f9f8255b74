"""The whole series on an H200: tokens per second of each capability, from benchmarks/compare_gpu.py.

python articles/figures/20_compare_gpu.py
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

NAMES = {"compare_gpt2_xl": "GPT-2 XL's shape", "compare_qwen3_0_6b": "Qwen3-0.6B's shape"}
figure, panels = plt.subplots(len(NAMES), figsize=(8.4, 4.1 * len(NAMES)))
for ax, (name, title) in zip(panels, NAMES.items(), strict=True):
    rows = result(name)["tables"]["race"]["rows"][::-1]
    colours = ["#b8b8b8" if whose == "Hugging Face" else "#2a6fbb" for whose, *_ in rows]
    names = [f"{whose}: {what}" if whose == "Hugging Face" else what for whose, what, *_ in rows]
    bars = ax.barh([name.replace("batch", "batch, as it comes") if name.endswith("_batch") else name
                    for name in names], [row[2] for row in rows], color=colours)  # fmt: skip
    ratios = [f"{ratio:,.0f}" if ratio > 100 else f"{ratio:.3g}" for *_, ratio in rows]
    ax.bar_label(bars, [f"{row[2]:,.0f}   ×{ratio}" for row, ratio in zip(rows, ratios, strict=True)],
                 padding=4, fontsize=9)  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(10, 2e5)
    ax.set_xlabel(f"output tokens per second, {title}, one H200; × generate, one by one")
    ax.tick_params(axis="y", length=0)
    bare(ax)
figure.tight_layout()
save(figure, __file__)
