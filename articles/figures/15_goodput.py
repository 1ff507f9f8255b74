"""Answers in time against what is asked for, on paper: without a bound, with one, and with a deadline alone.

python articles/figures/15_goodput.py      # writes 15_goodput.svg beside this file

8 seats, an answer takes 1 to 3 seconds, so full seats complete 4 a second. In time is who has all of it 5
seconds after asking. Requests come by chance, each once. Nothing is measured here.
"""

import heapq
from random import Random

import matplotlib.pyplot as plt
from drawing import bare, save

SEATS, TAKES, IN_TIME = 8, (1.0, 3.0), 5.0  # seats; seconds; seconds
PACE = SEATS / 2.0  # answers per second, 2 seconds each
BOUND, SECONDS = 16, 600  # admitted at once, running and waiting; of a run
SHARES = [0.1 * i for i in range(1, 31)]
SIDES = {  # (bound, whether a deadline ends a request)
    "a bound: 16 admitted, the others refused": (BOUND, False, "#2563eb"),
    "a deadline of 5 s alone": (10**9, True, "#b45309"),
    "no bound": (10**9, False, "#dc2626"),
}


def goodput(rate: float, bound: int, has_deadline: bool) -> float:
    """Answers per second in time. First come, first served."""
    random = Random(15)
    seats = [0.0] * SEATS  # when each is free: a heap
    leave: list[float] = []  # when each of those admitted leaves: a heap
    now, good = 0.0, 0
    while (now := now + random.expovariate(rate)) < SECONDS:
        while leave and leave[0] <= now:
            heapq.heappop(leave)
        takes, ends_at = random.uniform(*TAKES), now + IN_TIME
        if len(leave) >= bound:
            continue
        start = max(now, seats[0])
        if has_deadline and start >= ends_at:
            heapq.heappush(leave, ends_at)  # its time is over before it has a seat
            continue
        end = min(start + takes, ends_at) if has_deadline else start + takes
        heapq.heapreplace(seats, end)
        heapq.heappush(leave, end)
        good += start + takes <= ends_at
    return good / SECONDS


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.6))
    for name, (bound, has_deadline, colour) in SIDES.items():
        in_time = [goodput(share * PACE, bound, has_deadline) for share in SHARES]
        ax.plot(SHARES, in_time, color=colour, lw=1.8, label=name)
    ax.plot([0, 1], [0, PACE], color="#999999", lw=1, ls="--", label="all that is asked for")
    ax.axhline(PACE, color="#999999", lw=0.8, ls=":")
    ax.text(3, PACE + 0.1, "what full seats complete", color="#666666", fontsize=9, ha="right")
    ax.set(
        xlim=(0, 3.02),
        ylim=(0, 5.4),
        xlabel="asked for, of what full seats complete",
        ylabel="answers in time, per second",
    )
    ax.legend(frameon=False, loc="upper left", ncol=2, fontsize=9)
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
