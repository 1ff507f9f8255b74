"""How much work the server takes on, and when there will be room again. Part 15.

A request that is refused at once takes no resources; one that waits behind thousands takes its client's time
and the server's memory. So what is admitted is counted, in sequences and in tokens, against two bounds.
Promises that neither is ever exceeded, and that a refused client is told to come back before a seat is empty:
being refused twice is better than an empty seat. Pure counting: knows no engine and no HTTP, and reads the
clock it is given.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.server.limits import MAX_CHOICES

QUEUE_ROUNDS = 16  # the default queue holds as many sequences, and tokens, as run at once in so many rounds
PACE_ROUNDS = 4  # the pace is measured over the last sequences that left: so many for each seat
MAX_RETRY_SECONDS = 60.0  # a later answer is a guess; OpenAI's client would not wait for more than 120


@dataclass(frozen=True)
class QueueLimits:
    """Bounds on what is admitted, waiting and running together. The names are vLLM's.

    `max_num_queued_reqs` counts sequences: n samples of a prompt are n. `max_num_queued_tokens` counts each
    sequence's prompt and the longest output it may have (vLLM's counts prompts that are not read yet).
    """

    max_num_queued_reqs: int
    max_num_queued_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is accepted")


def queue_limits(
    seats: int, cache_tokens: int, max_model_len: int, reqs: int | None = None, tokens: int | None = None
) -> QueueLimits:
    """`reqs` and `tokens`; by default QUEUE_ROUNDS times what runs at once (`seats`) and what the cache
    holds, and never less than a request with the most choices takes. Raises ValueError.
    """
    if reqs is None:
        reqs = max(QUEUE_ROUNDS * seats, 2 * MAX_CHOICES)
    if tokens is None:
        tokens = max(QUEUE_ROUNDS * cache_tokens, MAX_CHOICES * max_model_len)
    return QueueLimits(reqs, tokens)


class Capacity:
    """What is admitted now, and at what pace it leaves."""

    def __init__(self, limits: QueueLimits, seats: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`seats`: how many sequences run at once. What is admitted beyond them waits."""
        self.limits, self.seats, self._clock = limits, seats, clock
        self.sequences = self.tokens = 0  # admitted and not given back
        # While every seat is taken and a sequence waits: the time when that began, then the time when each
        # sequence left. Otherwise empty.
        self._times: deque[float] = deque(maxlen=PACE_ROUNDS * seats + 1)

    def could_ever_fit(self, sequences: int, tokens: int) -> bool:
        """Whether an empty queue has room for so many."""
        limits = self.limits
        return sequences <= limits.max_num_queued_reqs and tokens <= limits.max_num_queued_tokens

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether there is room for so many more."""
        return self.could_ever_fit(self.sequences + sequences, self.tokens + tokens)

    def take(self, sequences: int, tokens: int) -> None:
        """Admit so many; ask `fits` first."""
        self.sequences += sequences
        self.tokens += tokens
        if self.sequences > self.seats and not self._times:
            self._times.append(self._clock())

    def give_back(self, sequences: int, tokens: int, worked: bool = True) -> None:
        """Count so many as gone. `worked`: the engine had begun with them, so they count for the pace."""
        if self._times and worked:
            self._times.extend([self._clock()] * sequences)
        self.sequences -= sequences
        self.tokens -= tokens
        if self.sequences <= self.seats:
            self._times.clear()

    def pace(self) -> float:
        """Sequences that leave in a second while every seat is taken and one waits; infinity: not known.

        With a free seat, what leaves tells of the demand, not of what the server can do. Sequences that run
        now count as if they left now: that errs on the high side, by one round of the seats at most.
        """
        seconds = self._clock() - self._times[0] if self._times else 0.0
        return (len(self._times) - 1 + self.seats) / seconds if seconds > 0 else math.inf

    def retry_after(self, sequences: int, tokens: int) -> float:
        """For a request that does not fit now: in how many seconds to come back.

        1. What is missing must leave first: what is admitted, and what is asked for, beyond the limit. Tokens
           leave with their sequences: missing tokens are as many sequences as hold them, on average. There is
           room when there is room for both.
        2. A client that comes too early is refused again, which costs nothing; one that comes too late leaves
           a seat empty. So it is to come when half of the sequences that wait for a seat have one; later only
           if there is no room before.
        3. They leave at `pace`. The result is at most MAX_RETRY_SECONDS.
        """
        limits = self.limits
        missing_sequences = self.sequences + sequences - limits.max_num_queued_reqs
        missing_tokens = max(0, self.tokens + tokens - limits.max_num_queued_tokens)
        missing = max(missing_sequences, missing_tokens * self.sequences / max(1, self.tokens))
        waiting = max(0, self.sequences - self.seats)
        return min(max(missing, waiting / 2) / self.pace(), MAX_RETRY_SECONDS)
