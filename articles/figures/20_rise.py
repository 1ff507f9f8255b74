"""What each part brings: tokens per second with all that it adds, from benchmarks/compare.py --shape gpt2.

python articles/figures/20_rise.py      # README's chart
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

rows = result("compare_gpt2")["tables"]["race"]["rows"]
others = {what: rate for whose, what, rate, _ in rows if whose == "Hugging Face"}
after: dict[
    str, tuple[str, float]
] = {}  # "Part 3" -> what it adds, a line each, and the speed with all of it
for _, what, rate, _ in rows[len(others) :]:
    part, _, adds = what.partition(": ")
    adds = adds.removeprefix("+ ").removesuffix(" instead").replace("continuous ", "continuous\n")
    after[part] = "\n".join(filter(None, [after.get(part, ("",))[0], adds])), rate
figure, ax = plt.subplots(figsize=(8.4, 3.6))
names = [f"{part}\n{adds}" for part, (adds, _) in after.items()]
bars = ax.bar(names, [rate for _, rate in after.values()], color="#2a6fbb", width=0.62)
ax.bar_label(bars, fmt="%.3g", padding=3)
for rate in others.values():
    ax.axhline(rate, color="#8a8a8a", lw=0.9, ls="--", zorder=0)
lowest, *_, highest = sorted(others.values())
dashes = f"dashes: Hugging Face's three ways, {lowest:.3g} to {highest:.3g}"
ax.text(-0.4, 60, dashes, color="#555555", fontsize=9)
ax.set_ylabel("output tokens per second")
ax.tick_params(axis="x", length=0)
bare(ax)
save(figure, __file__)
