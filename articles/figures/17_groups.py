"""Draws the sixteen numbers that four bits can say, for a row with an outlier: by row, and by group."""

import matplotlib.pyplot as plt
import torch
from drawing import bare, save

from engine.quantization.codes import dequantize_groups, quantize_groups

COUNT, GROUP = 24, 8
weight = torch.randn(1, COUNT, generator=torch.Generator().manual_seed(4)) * 0.1
weight[0, 13] = 1.0

figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
for ax, size, name in ((axes[0], COUNT, "one group of 24"), (axes[1], GROUP, "three groups of 8")):
    codes, scale, low = quantize_groups(weight, size)
    back = dequantize_groups(codes, scale, low, size)
    for group in range(COUNT // size):
        for code in range(16):
            y = float(low[0, group]) + code * float(scale[0, group])
            ax.hlines(
                y, group * size - 0.5, (group + 1) * size - 0.5, color="#c9d4e0", linewidth=0.8, zorder=0
            )
    ax.scatter(range(COUNT), weight[0], s=26, color="#1f4e79", label="weight")
    ax.scatter(
        range(COUNT), back[0], s=26, facecolors="none", edgecolors="#d1495b", label="what its code stands for"
    )
    error = float((back - weight).abs().mean())
    ax.set_title(f"{name}: wrong by {error:.3f} on average", fontsize=10)
    ax.set_xlabel("place in the row")
    bare(ax)
axes[0].set_ylabel("value; a line for each code")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
save(figure, __file__)
