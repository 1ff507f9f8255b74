"""Seats in use after a crowd has come: with the first version's Retry-After, and with today's.

python articles/figures/15_seats.py      # writes 15_seats.svg beside this file
"""

from collections import deque
from collections.abc import Callable

import matplotlib.pyplot as plt
from drawing import bare, save

from engine.server.capacity import Capacity, QueueLimits

SEATS, BOUND, PEOPLE, BEFORE = 8, 32, 100, 24
QUARTER = 0.25  # seconds


class Server:
    """Counts quarters of a second; as in the notebook."""

    def __init__(self) -> None:
        self.now = self.busy = self.promised = 0.0
        self.came = self.left = 0
        self.running, self.waiting = [], deque()
        self.capacity = Capacity(QueueLimits(BOUND, 10**6), SEATS, lambda: self.now)

    def admit(self) -> None:
        self.capacity.take(1, 50)
        self.waiting.append(4 + 5 * self.came % 9)  # quarters: 4 to 12
        self.came += 1

    def quarter(self) -> int:
        """Seats in use."""
        while self.waiting and len(self.running) < SEATS:
            self.running.append(self.waiting.popleft())
        in_use = len(self.running)
        self.now += QUARTER
        self.busy += QUARTER * bool(in_use)
        self.running = [quarters - 1 for quarters in self.running]
        for _ in range(self.running.count(0)):
            self.capacity.give_back(1, 50)
            self.left += 1
        self.running = [quarters for quarters in self.running if quarters]
        return in_use


def first_version(server: Server) -> float:
    when = max(server.now, server.promised) + server.busy / server.left
    server.promised = min(when, server.now + 60)
    return server.promised - server.now


def today(server: Server) -> float:
    return server.capacity.retry_after(1, 50)


def seats_in_use(advice: Callable[[Server], float]) -> list[int]:
    """In each quarter of a second since the crowd came, after light traffic."""
    server = Server()
    for _ in range(BEFORE):
        server.admit()
        while server.waiting or server.running:
            server.quarter()
    comes, seats = [server.now] * PEOPLE, []
    while comes or server.waiting or server.running:
        asking = sum(when <= server.now for when in comes)
        comes = [when for when in comes if when > server.now]
        for _ in range(asking):
            if server.capacity.fits(1, 50):
                server.admit()
            else:
                comes.append(server.now + max(1, int(advice(server))))
        seats.append(server.quarter())
    return seats


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3))
    for name, advice, colour in (("first version", first_version, "#dc2626"), ("today", today, "#2563eb")):
        seats = seats_in_use(advice)
        seconds = [QUARTER * quarter for quarter in range(len(seats) + 1)]
        ax.fill_between(seconds, [*seats, 0], step="post", color=colour, alpha=0.18, lw=0)
        ax.step(seconds, [*seats, 0], where="post", color=colour, lw=1.4)
        x = seconds[-1] - 1 if name == "today" else 45
        y = SEATS + 0.35 if name == "today" else 2.4
        ax.text(
            x, y, f"{name}: all done after {seconds[-1]:.0f} s", color=colour, ha="right" if y > 3 else "left"
        )
    ax.set(xlim=(0, 72), ylim=(0, 9.4), xlabel="seconds since 100 people came", ylabel="seats in use, of 8")
    bare(ax)
    figure.tight_layout()
    save(figure, __file__)


if __name__ == "__main__":
    main()
