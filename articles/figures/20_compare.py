"""The whole series in one chart: tokens per second of each capability, from benchmarks/compare.py."""

import matplotlib.pyplot as plt
from drawing import bare, result, save

found = result("compare_storyteller")
rows = found["tables"]["race"]["rows"][::-1]
figure, ax = plt.subplots(figsize=(8.4, 4.6))
colours = ["#b8b8b8" if whose == "Hugging Face" else "#2a6fbb" for whose, *_ in rows]
bars = ax.barh([f"{whose}: {what}" if whose == "Hugging Face" else what for whose, what, *_ in rows],
               [row[2] for row in rows], color=colours)  # fmt: skip
ax.bar_label(bars, [f"{rate:,.0f}   ×{ratio:.2g}" for *_, rate, ratio in rows], padding=4, fontsize=9)
ax.set_xlabel("output tokens per second, storyteller, one thread; × Hugging Face's generate, one by one")
ax.margins(x=0.16)
ax.tick_params(axis="y", length=0)
bare(ax)
save(figure, __file__)
