"""The life of a streamed request as a sequence diagram: client, event loop, model thread.

python articles/figures/04_life.py      # writes 04_life.svg beside this file
"""

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, GREY = "#222222", "#666666"
CLIENT, LOOP, MODEL, RED = "#d1fae5", "#dbeafe", "#fde68a", "#b91c1c"
X = {"client": 0.0, "loop": 4.3, "model": 8.6}


def head(ax, x: float, what: str, where: str, colour: str) -> None:
    box = FancyBboxPatch(
        (x - 1.3, 0.15), 2.6, 0.8, boxstyle="round,pad=0.02,rounding_size=0.1", fc=colour, ec=INK
    )
    ax.add_patch(box)
    ax.text(x, 0.68, what, ha="center", va="center", weight="bold")
    ax.text(x, 0.37, where, ha="center", va="center", family="DejaVu Sans Mono", fontsize=8)


def message(ax, y: float, start: str, end: str, text: str, colour: str = INK, mono: bool = True) -> None:
    """An arrow from one lifeline to another, its text above it."""
    a, b = X[start], X[end]
    shift = 0.09 if b > a else -0.09
    arrow = FancyArrowPatch(
        (a + shift, y),
        (b - shift, y),
        arrowstyle="-|>",
        mutation_scale=12,
        lw=1.2,
        color=colour,
        shrinkA=0,
        shrinkB=0,
    )
    ax.add_patch(arrow)
    family = "DejaVu Sans Mono" if mono else "DejaVu Sans"
    ax.text((a + b) / 2, y + 0.09, text, ha="center", fontsize=8.3, family=family, color=colour)


def note(ax, y: float, where: str, text: str, colour: str = GREY, side: int = 1) -> None:
    ax.text(
        X[where] + 0.2 * side,
        y,
        text,
        fontsize=8.5,
        color=colour,
        va="center",
        ha="left" if side > 0 else "right",
    )


def busy(ax, where: str, top: float, bottom: float, colour: str) -> None:
    ax.add_patch(
        Rectangle((X[where] - 0.09, bottom), 0.18, top - bottom, fc=colour, ec=INK, lw=0.8, zorder=3)
    )


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.5, 8.8))
    ax.set(xlim=(-1.9, 11.3), ylim=(-10.35, 1.15))
    ax.axis("off")
    head(ax, X["client"], "client", "curl · openai · httpx", CLIENT)
    head(ax, X["loop"], "event loop", "app.py · sse.py", LOOP)
    head(ax, X["model"], "model thread", "backend.py", MODEL)
    for x in X.values():
        ax.plot([x, x], [0.1, -10.2], color=GREY, lw=0.8, ls=(0, (4, 4)), zorder=0)

    # 1. Everything that can be refused is refused here.
    message(ax, -0.6, "client", "loop", "POST /v1/completions")
    busy(ax, "loop", -0.6, -1.75, LOOP)
    note(ax, -0.88, "loop", "fields: known? right type?   protocol.py")
    note(ax, -1.2, "loop", "values, prompt: in range?   params.py")
    message(ax, -1.6, "loop", "client", "or 400 {error: …}, and that was it", RED)

    # 2. From here on the status is fixed.
    message(ax, -2.3, "loop", "client", "200, text/event-stream")
    note(ax, -2.3, "loop", "wait for the lock: one request at a time")
    busy(ax, "loop", -2.3, -2.42, LOOP)

    # 3. A step in the thread, an event to the client.
    steps = (
        ("next(steps)", "one token", 'data: {…"text": ","}'),
        ("next(steps)", "one token", 'data: {…" there"}'),
    )
    for i, (ask, answer, event) in enumerate(steps):
        y = -3.0 - 1.25 * i
        message(ax, y, "loop", "model", ask)
        busy(ax, "model", y, y - 0.62, MODEL)
        message(ax, y - 0.62, "model", "loop", answer, mono=False)
        message(ax, y - 0.8, "loop", "client", event)
        busy(ax, "loop", y - 0.62, y - 0.85, LOOP)
        note(ax, y - 0.31, "model", "Part 3: one forward")
    ax.text(
        X["loop"] - 0.25, -2.78, "now free for others, until\na token comes back", fontsize=8.5,
        color=GREY, ha="right", va="center",
    )  # fmt: skip

    # 4. Three ends.
    ax.plot([-1.8, 11.2], [-5.55, -5.55], color=GREY, lw=0.6)
    ax.text(-1.8, -5.78, "either: it ends", fontsize=9, weight="bold", va="center")
    message(ax, -6.2, "loop", "client", 'data: {…"finish_reason": "stop"}')
    message(ax, -6.6, "loop", "client", "data: [DONE]")
    busy(ax, "loop", -6.1, -6.68, LOOP)
    note(ax, -6.4, "loop", "the lock is free")
    ax.plot([-1.8, 11.2], [-7.0, -7.0], color=GREY, lw=0.6)
    ax.text(-1.8, -7.23, "or: a step fails", fontsize=9, weight="bold", va="center")
    message(ax, -7.35, "loop", "model", "next(steps)")
    busy(ax, "model", -7.35, -7.75, MODEL)
    message(ax, -7.75, "model", "loop", "an exception", RED, mono=False)
    message(ax, -7.9, "loop", "client", 'data: {"error": {…}}', RED)
    message(ax, -8.3, "loop", "client", "data: [DONE]")
    busy(ax, "loop", -7.75, -8.38, LOOP)
    note(ax, -8.12, "loop", "200 has gone out: one more event;\nthe lock is free")
    ax.plot([-1.8, 11.2], [-8.65, -8.65], color=GREY, lw=0.6)
    ax.text(-1.8, -8.88, "or: the client leaves", fontsize=9, weight="bold", va="center")
    message(ax, -9.0, "loop", "model", "next(steps)")
    busy(ax, "model", -9.0, -9.65, MODEL)
    message(ax, -9.25, "client", "loop", "connection closed", RED, mono=False)
    busy(ax, "loop", -9.25, -10.1, LOOP)
    message(ax, -9.65, "model", "loop", "one token, unread", GREY, mono=False)
    note(ax, -9.95, "loop", "no further next(steps): iterator closed,\nits cache freed, the lock free")

    save(figure, __file__)


if __name__ == "__main__":
    main()
