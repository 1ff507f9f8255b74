"""Who runs in which step of a first-in-first-out queue: all stay, and two leave.

python articles/figures/06_timeline.py      # writes 06_timeline.svg, from part06_queue.json
"""

import matplotlib.pyplot as plt
from drawing import bare, result, save

WAITING, READING, WRITING, BAD = "#e2e8f0", "#0f766e", "#5eead4", "#b91c1c"
TITLES = {
    "all_stay": "First in, first out: C waits for two whole stories",
    "two_leave": "B gives up after step 2, A after step 4: C runs in the next step",
}


def draw(ax: plt.Axes, seen: dict[str, dict], title: str) -> None:
    for row, request in enumerate(seen.values()):
        ax.barh(
            row, request["ended"] - request["arrived"], left=request["arrived"], height=0.6, color=WAITING
        )
        for step, tokens in zip(request["steps"], request["tokens"], strict=True):
            reading = tokens > 1
            ax.barh(row, 0.92, left=step - 0.96, height=0.6, color=READING if reading else WRITING)
            ax.text(
                step - 0.5,
                row,
                tokens,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if reading else "black",
            )
        if request["reason"] == "abort":
            ax.plot(request["ended"] + 0.25, row, "x", color=BAD, markersize=8, mew=2)
    ax.set_yticks(range(len(seen)), list(seen))
    ax.invert_yaxis()
    ax.set_title(title, loc="left", weight="bold")
    bare(ax)


def main() -> None:
    scenes = result("part06_queue")["figures"]["timeline"]
    figure, axes = plt.subplots(2, 1, figsize=(8.6, 4.3), sharex=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        draw(ax, scenes[name], title)
    axes[1].set(xlabel="steps done", xlim=(0, 20.5), xticks=range(0, 21, 2))
    for colour, text in ((WAITING, "waiting"), (READING, "reads its prompt"), (WRITING, "writes a token")):
        axes[0].bar(0, 0, color=colour, label=text)
    axes[0].legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.05))
    figure.text(
        0.99, 0.005, "numbers: tokens computed in the step", ha="right", fontsize=8.5, color="#666666"
    )
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
