"""One step: three drafts are read by the target in one pass; its own choice behind each of them decides.

python articles/figures/16_step.py      # writes 16_step.svg
"""

from drawing import plt, save

GREEN, RED, GREY, BLUE = "#bbf7d0", "#fecaca", "#e2e8f0", "#bfdbfe"
READ = [("park", GREY), ("with", GREEN), ("her", GREEN), ("dog", RED)]  # the last token known, then drafts
SAYS = [("with", GREEN), ("her", GREEN), ("mom", BLUE), ("and", "white")]
NOTES = [
    "= the draft: it stands",
    "= the draft: it stands",
    "not the draft: this is the token",
    "behind a wrong token",
]


def box(ax, x: float, y: float, text: str, colour: str, struck: bool = False) -> None:
    ax.add_patch(plt.Rectangle((x, y), 1.7, 0.62, facecolor=colour, edgecolor="#475569", lw=1))
    ax.text(x + 0.85, y + 0.31, text, ha="center", va="center", fontsize=12)
    if struck:
        ax.plot([x + 0.2, x + 1.5], [y + 0.31, y + 0.31], color="#b91c1c", lw=1.6)


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.5))
    for i, ((read, colour), (says, own)) in enumerate(zip(READ, SAYS, strict=True)):
        x = 2.4 + i * 2.35
        box(ax, x, 2.4, read, colour, struck=colour == RED)
        ax.annotate(
            "", (x + 0.85, 1.28), (x + 0.85, 2.34), arrowprops={"arrowstyle": "->", "color": "#475569"}
        )
        box(ax, x, 0.6, says, own, struck=own == "white")
        ax.text(x + 0.85, 0.5, NOTES[i], ha="center", va="top", fontsize=8.2, color="#475569")
    ax.plot([2.2, 11.5, 11.5, 2.2, 2.2], [1.5, 1.5, 2.1, 2.1, 1.5], color="#0f766e", lw=1.2)
    ax.text(6.85, 1.8, "the target: one pass, four rows", ha="center", va="center", color="#0f766e",
            backgroundcolor="white")  # fmt: skip
    ax.text(0, 2.71, "what it reads", va="center", weight="bold")
    ax.text(0, 0.91, "what it would\nsay behind each", va="center", weight="bold")
    ax.text(2.4, 3.2, "known", fontsize=9, color="#475569")
    ax.text(4.75, 3.2, "drafts, from three passes of the small model", fontsize=9, color="#475569")
    ax.text(2.4, -0.35, "The step brings three tokens: with, her, mom.", fontsize=10.5, weight="bold")
    ax.set(xlim=(-0.1, 11.8), ylim=(-0.5, 3.5))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
