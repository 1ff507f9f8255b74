"""How much work the server takes on, and when there will be room again. Part 15.

A request that is turned away at the door costs nothing; one that waits behind thousands costs its client the
wait and everybody the memory. So what is admitted is counted, in sequences and in tokens, against two bounds.
Promises that neither is ever exceeded, and that who is turned away is told a time to come back at which, at
the pace of late, there is room. Pure counting: knows no engine, no HTTP, and the time by a clock it is given.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.server.limits import MAX_CHOICES

ROUNDS = 16  # times that the running requests' seats, or memory, may be asked for: the rest are turned away
RECENT = 64  # ends of requests that the pace is taken from
FIRST_GUESS = 5.0  # seconds: nothing has ended yet, so nobody knows the pace
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
    """`reqs` and `tokens`, by default ROUNDS times what runs at once (`seats`) and what the cache holds; but
    one request with the most choices there may be must have room. Raises ValueError.
    """
    return QueueLimits(
        max(ROUNDS * seats, 2 * MAX_CHOICES) if reqs is None else reqs,
        max(ROUNDS * cache_tokens, MAX_CHOICES * max_model_len) if tokens is None else tokens,
    )


class Room:
    """What is admitted now, and at what pace it leaves."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self.sequences = self.tokens = 0  # admitted and not given back
        self._busy, self._busy_since = 0.0, 0.0  # seconds in which somebody was here; since when, if now
        self._left = [0, 0]  # sequences and tokens that have left, ever
        self._past = deque([(0.0, 0, 0)], maxlen=RECENT + 1)  # (busy seconds, what had left by then)
        self._promised_until = -math.inf  # when the last who was turned away is to come back

    def could_ever_fit(self, sequences: int, tokens: int) -> bool:
        limits = self.limits
        return sequences <= limits.max_num_queued_reqs and tokens <= limits.max_num_queued_tokens

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether there is room for so many more."""
        return self.could_ever_fit(self.sequences + sequences, self.tokens + tokens)

    def take(self, sequences: int, tokens: int) -> None:
        if not self.sequences:
            self._busy_since = self._clock()
        self.sequences += sequences
        self.tokens += tokens

    def give_back(self, sequences: int, tokens: int, worked: bool = True) -> None:
        """`worked`: they were taken on in earnest, so that their leaving tells of the pace."""
        busy = self._busy_seconds()
        if worked:
            self._left[0] += sequences
            self._left[1] += tokens
            self._past.append((busy, *self._left))
        self.sequences -= sequences
        self.tokens -= tokens
        if not self.sequences:
            self._busy = busy

    def _busy_seconds(self) -> float:
        """Time in which nobody was here says nothing about the pace, and is left out."""
        return self._busy + (self._clock() - self._busy_since if self.sequences else 0.0)

    def pace(self) -> tuple[float, float]:
        """Sequences and tokens that leave in a second, over the last RECENT ends; (0, 0): not known."""
        busy, sequences, tokens = self._past[0]
        seconds = self._busy_seconds() - busy
        if seconds <= 0:
            return 0.0, 0.0
        return (self._left[0] - sequences) / seconds, (self._left[1] - tokens) / seconds

    def seconds_until_room(self, sequences: int, tokens: int) -> float:
        """For a request that does not fit now: in how many seconds to come back. Each call makes a promise.

        1. What is missing of each kind (what is admitted, and what is asked for, beyond the limit) leaves at
           its `pace`; the slower kind counts. The result is never before that.
        2. Nobody is to come back with everybody else: the result is also not before the time promised last
           (`_promised_until`), plus the time in which what is asked for leaves.
        3. At most MAX_RETRY_SECONDS, and that is then the time promised last. With no pace known yet:
           FIRST_GUESS, and no promise.
        """
        paces = self.pace()
        if not all(paces):
            return FIRST_GUESS

        def seconds(*amounts: int) -> float:
            return max(amount / pace for amount, pace in zip(amounts, paces, strict=True))

        now, limits = self._clock(), self.limits
        missing = (
            max(0, self.sequences + sequences - limits.max_num_queued_reqs),
            max(0, self.tokens + tokens - limits.max_num_queued_tokens),
        )
        when = max(now + seconds(*missing), self._promised_until + seconds(sequences, tokens))
        self._promised_until = min(when, now + MAX_RETRY_SECONDS)
        return self._promised_until - now
