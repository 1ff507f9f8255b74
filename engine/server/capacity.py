"""How many sequences and tokens the server admits, and when there will be room again. Part 15.

A refused request takes no resources. A request that waits behind thousands of others takes the client's time
and the server's memory. `Capacity` therefore counts the admitted sequences and tokens against two bounds.

Promises that the bounds hold for a caller that asks `fits` first. A refused client is told to come back
while, at the present pace, other sequences still wait for a seat (a place among the sequences that run at
once): a client that comes too early is refused again, which costs nothing; an empty seat is lost work. Knows
no engine and no HTTP.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.server.limits import MAX_CHOICES

QUEUE_ROUNDS = 16  # the default bounds, as a multiple of the sequences and tokens that run at once
PACE_ROUNDS = 4  # the pace is measured over this many sequences per seat, the last that left
MIN_RETRY_SECONDS = 0.1  # while no pace is known, and however fast the queue empties
MAX_RETRY_SECONDS = 60.0  # a longer forecast is a guess; OpenAI's client waits for 120 at most


@dataclass(frozen=True)
class QueueLimits:
    """Bounds on all admitted requests together, both waiting and running. The names are vLLM's.

    `max_num_queued_reqs` bounds the sequences; n samples of a prompt are n sequences. `max_num_queued_tokens`
    bounds the tokens of all sequences: for each, the prompt and the longest output that the sequence may have
    (vLLM counts the tokens of prompts that have not been computed yet). Raises ValueError if one is below 1.
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
    """The limits `reqs` and `tokens`, or defaults where these are None.

    The default is QUEUE_ROUNDS times `seats` (how many sequences run at once) for the sequences, and
    QUEUE_ROUNDS times `cache_tokens` (how many tokens the cache holds) for the tokens. But each default has
    room for a request with MAX_CHOICES choices; that for the sequences has room for two.

    Raises ValueError for a limit below 1.
    """
    if reqs is None:
        reqs = max(QUEUE_ROUNDS * seats, 2 * MAX_CHOICES)
    if tokens is None:
        tokens = max(QUEUE_ROUNDS * cache_tokens, MAX_CHOICES * max_model_len)
    return QueueLimits(reqs, tokens)


class Capacity:
    """The sequences and tokens that are admitted now, and the pace at which sequences leave."""

    def __init__(self, limits: QueueLimits, seats: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`seats`: how many sequences run at once; further admitted sequences wait. `clock`: seconds."""
        self.limits, self.seats, self._clock = limits, seats, clock
        self.sequences, self.tokens = 0, 0  # admitted and not yet given back
        # While every seat is taken and a sequence waits: the time when that state began, then the time of
        # each sequence that has left since; of all these times, the last PACE_ROUNDS * seats + 1. Otherwise
        # empty.
        self._times: deque[float] = deque(maxlen=PACE_ROUNDS * seats + 1)

    def could_ever_fit(self, sequences: int, tokens: int) -> bool:
        """Whether an empty queue has room for this many sequences and tokens."""
        limits = self.limits
        return sequences <= limits.max_num_queued_reqs and tokens <= limits.max_num_queued_tokens

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether there is room now for this many more sequences and tokens."""
        return self.could_ever_fit(self.sequences + sequences, self.tokens + tokens)

    def take(self, sequences: int, tokens: int) -> None:
        """Count this many more as admitted. Does not check the limits: call `fits` first."""
        self.sequences += sequences
        self.tokens += tokens
        if self.sequences > self.seats and not self._times:
            self._times.append(self._clock())

    def give_back(self, sequences: int, tokens: int, has_begun: bool = True) -> None:
        """Count this many as gone. They count for the pace if the engine has begun them."""
        if self._times and has_begun:
            self._times.extend([self._clock()] * sequences)
        self.sequences -= sequences
        self.tokens -= tokens
        if self.sequences <= self.seats:
            self._times.clear()

    def pace(self) -> float:
        """How many sequences leave per second; infinity if the pace is not known.

        The pace is measured only while every seat is taken and a sequence waits: with a free seat, the rate
        depends on the demand, not on the server's speed. Sequences that run now count as if they left now, so
        their number is too high by `seats` at most.
        """
        if not self._times:
            return math.inf
        seconds = self._clock() - self._times[0]
        if seconds <= 0:
            return math.inf
        num_left = len(self._times) - 1
        return (num_left + self.seats) / seconds

    def retry_after(self, sequences: int, tokens: int) -> float:
        """In how many seconds the client of a request that does not fit now should come back.

        1. How many sequences must leave to make room. For the sequences: the number admitted plus the number
           asked for, less the limit. For the tokens: the tokens admitted plus the tokens asked for, less the
           limit, 0 at least; converted to sequences by the average number of tokens that an admitted sequence
           holds. The request needs room for both, so the larger number counts.
        2. How many sequences may leave before a seat could be empty: half of the sequences that wait for a
           seat (admitted, beyond `seats`). A client that comes too early is refused again, which costs
           nothing; a client that comes too late leaves a seat empty.
        3. The larger of 1 and 2, divided by `pace`, and at most MAX_RETRY_SECONDS. 0 if no pace is known.
        """
        limits = self.limits
        missing_sequences = self.sequences + sequences - limits.max_num_queued_reqs
        missing_tokens = max(0, self.tokens + tokens - limits.max_num_queued_tokens)
        missing = max(missing_sequences, missing_tokens * self.sequences / max(1, self.tokens))
        waiting = max(0, self.sequences - self.seats)
        return min(max(missing, waiting / 2) / self.pace(), MAX_RETRY_SECONDS)
