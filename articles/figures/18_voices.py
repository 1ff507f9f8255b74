"""A decode step over the number of voices in it, a line for each size of the crowd.

python articles/figures/18_voices.py      # writes 18_voices.svg, from part18_mixed.json
"""

from drawing import bare, plt, result, save

VOICES = {  # side: how many adapters have rows in the step
    "slots, base alone": 0,
    "slots, one adapter": 1,
    "slots, base and two adapters": 2,
    "slots, four adapters": 4,
}
COLOURS = {1: "#94a3b8", 4: "#0f766e", 16: "#b45309"}


def main() -> None:
    rows = result("part18_mixed")["tables"]["steps"]["rows"]
    figure, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for crowd, colour in COLOURS.items():
        of_crowd = {side: ms for requests, side, ms, *_ in rows if requests == crowd}
        points = [(VOICES[side], ms) for side, ms in of_crowd.items() if side in VOICES]
        ax.plot(*zip(*points, strict=True), "o-", color=colour)
        ax.plot(-0.25, of_crowd["no slots, base"], "_", ms=14, mew=2, color=colour)
        words = "1 request" if crowd == 1 else f"{crowd} requests"
        ax.annotate(words, points[-1], (7, 0), textcoords="offset points", color=colour, va="center")
    ax.set(xlabel="adapters in the step (the short lines: no slots at all)", ylabel="ms a decode step")
    ax.set(xticks=(0, 1, 2, 4), xlim=(-0.4, 4.9), ylim=(0, None))
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
