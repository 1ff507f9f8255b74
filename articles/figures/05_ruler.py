"""A draw as a picture: probabilities laid end to end, and a needle that seed and position place.

python articles/figures/05_ruler.py      # writes 05_ruler.svg beside this file
"""

from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from engine.decoding.sampling import uniform

WORDS = {"girl": 0.3, "house": 0.2, "bird": 0.15, "boy": 0.12, "mouse": 0.1, "…": 0.13}
DRAWS = [("Bob", 99, 0, "#15803d"), ("Alice", 7, 0, "#b91c1c"), ("Alice", 7, 2, "#b91c1c")]  # by their u
plt.rcParams.update({"svg.hashsalt": "05_ruler", "font.family": "DejaVu Sans", "font.size": 10})


def main() -> None:
    figure, ax = plt.subplots(figsize=(9, 2.7))
    ends = list(accumulate(WORDS.values()))
    for place, ((word, width), end) in enumerate(zip(WORDS.items(), ends, strict=True)):
        ax.barh(0, width, left=end - width, height=0.5, color=plt.cm.Blues(0.6 - 0.09 * place), ec="white")
        ax.text(end - width / 2, 0, word, ha="center", va="center")
    for level, (who, seed, position, colour) in enumerate(DRAWS):
        u = uniform(seed, position)
        y = 0.62 + 0.3 * (len(DRAWS) - level)
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.6}
        ax.annotate("", (u, 0.26), (u, y + 0.1), arrowprops=arrow)
        text = f"{who}: uniform(seed={seed}, position={position}) = {u:.3f}"
        x, side = (u + 0.008, "left") if u < 0.6 else (u - 0.008, "right")
        ax.text(x, y, text, ha=side, va="center", color=colour, family="DejaVu Sans Mono", fontsize=8.5)
    ax.set(xlim=(0, 1.005), ylim=(-0.3, 1.7), yticks=[], xlabel="probabilities of one row, laid end to end")
    ax.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    target = Path(__file__).with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    print(target.name)


if __name__ == "__main__":
    main()
