"""Three clients streaming at once beside the engine's batch sizes, from a recording of Part 8's demo.

python parts/08_continuous_batching/demo.py --recording articles/figures/08_recording.txt
python articles/figures/08_recording.py    # writes 08_recording.svg, from 08_recording.txt
"""

from pathlib import Path

import matplotlib.pyplot as plt
from drawing import bare, save

RECORDING = Path(__file__).with_suffix(".txt")
COLOURS = ("#0f766e", "#b45309", "#2563eb")


def main() -> None:
    lines = RECORDING.read_text().splitlines()
    head = next(line for line in lines if "client 1   " in line)
    left = [head.index(f"client {i}") for i in (1, 2, 3)]
    milliseconds, sizes, came = [], [], [[], [], []]
    for line in lines[lines.index(head) + 1 :]:
        milliseconds.append(int(line[:6]))
        sizes.append(int(line[12:22]))
        for client, place in enumerate(left):
            if line[place : place + 1] == '"':
                came[client].append(milliseconds[-1])
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8.6, 4), sharex=True, gridspec_kw={"height_ratios": (3, 2)}
    )
    for client, (times, colour) in enumerate(zip(came, COLOURS, strict=True)):
        top.vlines(times, client + 0.15, client + 0.85, color=colour, lw=1)
    top.set_yticks([0.5, 1.5, 2.5], ["client 1", "client 2", "client 3"])
    top.set_ylim(3, 0)
    top.tick_params(length=0)
    top.set_title("A line is a piece of text that reached the client", loc="left", fontsize=10)
    bottom.step(milliseconds, sizes, where="post", color="#334155")
    bottom.fill_between(milliseconds, sizes, step="post", color="#cbd5e1")
    bottom.set(xlabel="ms since the first client began", yticks=(0, 1, 2, 3), ylim=(0, 3.4))
    bottom.set_title("Requests in each of the engine's steps", loc="left", fontsize=10)
    for ax in (top, bottom):
        bare(ax)
    figure.suptitle("Joining and leaving in full flow", x=0.02, ha="left", weight="bold")
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
