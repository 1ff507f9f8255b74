"""Host and device over time, one step at a time and one step ahead. Drawn, not measured: host 3 ms, device 5.

python articles/figures/13_ahead.py    # writes 13_ahead.svg
"""

from drawing import plt, save
from matplotlib.patches import Rectangle

HOST, DEVICE, STEPS = 3, 5, 4
COLOURS = ("#fdba74", "#93c5fd")
INK, GREY = "#1f2937", "#64748b"


def bar(ax, start: float, width: float, y: float, text: str, colour: str) -> None:
    ax.add_patch(Rectangle((start, y), width, 0.8, facecolor=colour, edgecolor="white", lw=1.5))
    ax.text(start + width / 2, y + 0.4, text, ha="center", va="center", color=INK, fontsize=8.5)


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.4, 4.4))
    # One at a time: the host lands step n and launches n + 1 while the device stands still.
    for n in range(STEPS):
        start = n * (HOST + DEVICE)
        bar(ax, start, HOST, 4.6, f"land {n}\nlaunch {n + 1}" if n else "launch 1", COLOURS[0])
        bar(ax, start + HOST, DEVICE, 3.7, f"step {n + 1}", COLOURS[1])
    # One ahead: the host's turn begins as soon as the device has begun with what is launched.
    bar(ax, 0, HOST, 1.9, "launch 1", COLOURS[0])
    bar(ax, HOST, HOST, 1.9, "launch 2", COLOURS[0])
    for n in range(1, STEPS + 2):
        start = HOST + (n - 1) * DEVICE
        bar(ax, start, DEVICE, 1.0, f"step {n}", COLOURS[1])
        if n <= STEPS:
            bar(ax, start + DEVICE, HOST, 1.9, f"land {n}\nlaunch {n + 2}", COLOURS[0])
    for y, text in ((5.75, "one step at a time: 8 ms each"), (3.05, "one step ahead: 5 ms each")):
        ax.text(0, y, text, weight="bold", color=INK)
    for y, text in ((5.0, "host"), (4.1, "device"), (2.3, "host"), (1.4, "device")):
        ax.text(-0.4, y, text, ha="right", va="center", color=INK)
    for ms in range(0, 33, 4):
        ax.plot([ms, ms], [0.75, 5.5], color="#e2e8f0", lw=0.8, zorder=0)
        ax.text(ms, 0.4, f"{ms} ms", ha="center", color=GREY, fontsize=8.5)
    ax.set(xlim=(-3, 33), ylim=(0.2, 6.1))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
