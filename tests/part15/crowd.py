"""A crowd before a server on paper: seats, steps that take longer with more of them, and people who obey."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable

from engine.server.capacity import MIN_RETRY_SECONDS, Capacity, QueueLimits
from tests.part15.fakes import Clock

SEATS, PEOPLE = 8, 100
ALONE, FULL = 0.0125, 0.025  # seconds of a step with one sequence, and with SEATS of them
Length = Callable[[random.Random], int]  # draws the number of an answer's tokens, of which a step makes one


class Server:
    """Runs SEATS sequences at once, by a clock of its own."""

    def __init__(self, max_num_queued_reqs: int, slow: float) -> None:
        """`slow`: how many times as long a step takes."""
        self.clock, self.slow = Clock(), slow
        self.capacity = Capacity(QueueLimits(max_num_queued_reqs, 10**6), SEATS, self.clock)
        self.running: list[int] = []  # tokens that each has yet to make
        self.waiting: deque[int] = deque()

    def admit(self, tokens: int) -> None:
        self.capacity.take(1, 50)
        self.waiting.append(tokens)

    def step(self) -> None:
        """One token for each who has a seat; who has all of them leaves."""
        while self.waiting and len(self.running) < SEATS:
            self.running.append(self.waiting.popleft())
        seconds = ALONE + (FULL - ALONE) * max(0, len(self.running) - 1) / (SEATS - 1)
        self.clock.now += self.slow * seconds
        self.running = [tokens - 1 for tokens in self.running]
        for _ in range(self.running.count(0)):
            self.capacity.give_back(1, 50)
        self.running = [tokens for tokens in self.running if tokens]


def whole_seconds(wait: float) -> float:
    """What Retry-After says of this wait."""
    return max(1, math.floor(wait))


def milliseconds(wait: float) -> float:
    """What `retry-after-ms` says of this wait, in seconds."""
    return max(MIN_RETRY_SECONDS, math.floor(1000 * wait) / 1000)


def serve(
    max_num_queued_reqs: int,
    before: int,
    length: Length,
    slow: float,
    seed: int,
    header: Callable[[float], float] = whole_seconds,
) -> tuple[float, int]:
    """(seconds until the last of PEOPLE who come at once is done, refusals). `before`: requests that came
    earlier, one after the other. `header`: the one that whoever is refused obeys.
    """
    server, lengths = Server(max_num_queued_reqs, slow), random.Random(seed)
    for _ in range(before):
        server.admit(length(lengths))
        while server.running or server.waiting:
            server.step()
    start = server.clock.now
    outside = [(start, person) for person in range(PEOPLE)]  # when each asks next: a heap
    refusals = 0
    while outside or server.running or server.waiting:
        now = server.clock.now
        while outside and outside[0][0] <= now:
            _, person = heapq.heappop(outside)
            if server.capacity.fits(1, 50):
                server.admit(length(lengths))
            else:
                refusals += 1
                told = header(server.capacity.retry_after(1, 50))
                heapq.heappush(outside, (now + told, person))
        server.step()
    return server.clock.now - start, refusals
