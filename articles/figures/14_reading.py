"""One of 32 readers: words that are there, and words that have been read, with a stream and without.

python articles/figures/14_reading.py      # writes 14_reading.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

COLOURS = {"stream": "#1d4ed8", "one piece": "#b91c1c"}


def main() -> None:
    figures = result("part14_streaming")["figures"]
    pace = figures["reading_words_per_second"]
    figure, (near, far) = plt.subplots(1, 2, figsize=(10, 3.6), gridspec_kw={"width_ratios": [1, 1.25]})
    for name, words in figures["trace"].items():
        colour, read, now = COLOURS[name], [], 0.0
        for there in words:
            now = max(now, there) + 1 / pace
            read.append(now)
        for ax in (near, far):
            count = range(1, len(words) + 1)
            ax.step([0, *words], [0, *count], where="post", color=colour, lw=1.8, label=f"{name}: there")
            ax.plot([words[0], *read], [0, *count], "--", color=colour, lw=1.2, label=f"{name}: read")
    last = max(words[-1] for words in figures["trace"].values())
    near.set(xlim=(0, last * 1.15), xlabel="seconds", ylabel="words", title="while the answer is written")
    far.set(xlim=(0, None), xlabel="seconds", title="until it has been read")
    far.legend(loc="lower right", frameon=False, fontsize=9)
    for ax in (near, far):
        bare(ax)
        ax.set_ylim(0, None)
        ax.title.set_fontsize(10)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
