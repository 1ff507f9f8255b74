"""Who pays for the device's time: a listener that gives each nanosecond to a request, or to none. Part 19.

Promises that at any moment the time it has given out, and the time under way, add up to the time since its
start: none counted twice, none left out, under any schedule. Two rules do it:

- It is idle while there are no requests. All other time belongs to the step that ends it.
- A step's time is shared among its requests by the work they caused (shares.py).

Where two steps overlap (Part 13), the second has the time from the first one's end to its own. What no
request should pay for is the operator's: a failed step, tokens computed again after a preemption, tokens of a
request that had left meanwhile, idle time. Knows no HTTP and no files.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill, Price
from engine.telemetry.shares import Weights, Work, share_out, work_of


@dataclass(slots=True, eq=False)
class Account:
    """What one user's request has cost so far, all its n samples together."""

    request_id: str
    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAID_KINDS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAID_KINDS, 0))
    open_samples: int = 0  # that have not ended
    reason: str | None = None  # how it ended; of several samples, the last one

    @property
    def total_ns(self) -> int:
        return sum(self.ns.values())


@dataclass(slots=True)
class MeteredSample:
    """A sample under way."""

    request: Request
    account: Account
    counts_prompt: bool = True  # only for the first of several samples: there is one prompt
    cached: int = 0  # tokens found in the cache
    reached: int = 0  # tokens computed, or found in the cache, and known to be right
    num_output_tokens: int = 0  # that the account has


class CostMeter(Listener):
    """Begins to count when it is made; add it to the engine's listeners then."""

    def __init__(
        self,
        price: Price,
        weights: Weights | None = None,
        api_price: ApiPrice | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` gives seconds, and is the one of the steps' records."""
        self.price, self.weights, self.api_price = price, weights or Weights(), api_price
        self.closed: list[Callable[[Account], None]] = []  # called with each account that is complete
        self._clock = clock
        self._lock = threading.Lock()  # between the engine's thread and readers
        self._shared_until = self.started = self._now()  # the time before this is given out
        self._ns = dict.fromkeys([*PAID_KINDS, *UNPAID_KINDS[:-1]], 0)
        self._tokens = dict.fromkeys(PAID_KINDS, 0)
        self._num_ended = 0  # requests
        self._samples: dict[str, MeteredSample] = {}  # by the sample's id
        self._accounts: dict[str, Account] = {}  # by the request's id, until all its samples have ended

    def _now(self) -> int:
        return nanoseconds(self._clock())

    def _take(self, until: int) -> int:
        """Nanoseconds up to `until` that are not given out yet; they count as given out from now on."""
        new_ns = max(until - self._shared_until, 0)
        self._shared_until += new_ns
        return new_ns

    # What the engine tells its listeners.

    def on_arrival(self, request: Request) -> None:
        """A sample of a request, which has one account for all of them; the first one ends idle time."""
        with self._lock:
            if not self._samples:
                self._ns["idle"] += self._take(self._now())
            account = self._accounts.setdefault(request.request_id, Account(request.request_id))
            account.open_samples += 1
            request.stats.account = account
            self._samples[request.id] = MeteredSample(
                request, account, counts_prompt=account.open_samples == 1
            )

    def on_step(self, record: StepRecord) -> None:
        """Give out the time that this step ends (`_take`), up to `record.end`. Holds the lock: others read.

        1. If the step failed, all of it is the operator's, as `failed`, and no request has got anywhere.
        2. Else every sample in it has its work (`_work`). One that is not in `_samples` has left: what was
           done for it, each token an output token, and each token held, is `late`.
        3. All works share the time in one go, so that it is given out to the last nanosecond.
        4. What a request pays for (PAID_KINDS) stands on its account and in the sum; the rest in the sum
           alone.
        """
        with self._lock:
            new_ns = self._take(nanoseconds(record.end))
            if record.error is not None:
                self._ns["failed"] += new_ns
                return
            shares: list[tuple[str, Account | None]] = []
            weights: list[int] = []
            for s, request_id in enumerate(record.request_ids):
                computed, held = record.tokens_computed[s], record.tokens_held[s]
                sample = self._samples.get(request_id)
                if sample is None:
                    shares.append(("late", None))
                    weights.append(computed * self.weights.output + held * self.weights.held)
                    continue
                for kind, weight in self._work(sample, held - computed, held):
                    shares.append((kind, sample.account if kind in PAID_KINDS else None))
                    weights.append(weight)
            for (kind, account), ns in zip(shares, share_out(new_ns, weights), strict=True):
                self._ns[kind] += ns
                if account:
                    account.ns[kind] += ns

    def _work(self, sample: MeteredSample, start: int, end: int) -> list[tuple[str, int]]:
        """(kind, weight) of the work that a step did for a sample, its tokens `start` to `end`; the new ones
        are added to the account.
        """
        request = sample.request
        prompt = request.num_prompt_tokens
        num_output_tokens = len(request.stats.token_times)
        computed_one = start == sample.reached and end == start + 1
        chose_one = num_output_tokens == sample.num_output_tokens + 1
        if computed_one and chose_one and start >= prompt:
            # One more output token, as for nearly all samples: the code below gives the same, slower.
            sample.reached, sample.num_output_tokens = end, num_output_tokens
            self._tokens["output"] += 1
            sample.account.tokens["output"] += 1
            return [("output", self.weights.output + end * self.weights.held)]
        # 1. A step that begins behind what was reached: the cache has the tokens between.
        newly_cached = max(start - sample.reached, 0)
        sample.cached += newly_cached
        sample.reached += newly_cached
        work = work_of(
            prompt=prompt,
            cached=sample.cached,
            reached=sample.reached,
            start=start,
            end=end,
            weights=self.weights,
        )
        # 2. What is new of it: tokens of the prompt, and output tokens.
        num_known = len(request.token_ids) - request.num_output_placeholders
        reached = max(sample.reached, min(end, num_known - 1))  # rejected drafts are computed anew (Part 16)
        new_tokens = {
            "cached": newly_cached,
            "input": max(min(reached, prompt) - sample.reached, 0),
            "output": num_output_tokens - sample.num_output_tokens,
        }
        for kind, count in new_tokens.items():
            if count and (sample.counts_prompt or kind == "output"):
                self._tokens[kind] += count
                sample.account.tokens[kind] += count
        sample.reached, sample.num_output_tokens = reached, num_output_tokens
        return [(kind, weight) for kind, weight in zip(Work._fields, work) if weight]

    def on_finish(self, request: Request) -> None:
        """The last sample of a request that ends completes its account, which goes to `closed`."""
        with self._lock:
            sample = self._samples.pop(request.id, None)
            if sample is None:  # it was here before we listened
                return
            account = sample.account
            account.open_samples -= 1
            account.reason = request.output.finish_reason
            if account.open_samples:
                return
            del self._accounts[account.request_id]
            self._num_ended += 1
        for callback in self.closed:
            callback(account)

    # What other threads read.

    def read(self) -> Bill:
        """The bill as it stands. Steps under way are in it as time that is not given to a request yet."""
        with self._lock:
            now = self._now()
            if not self._samples:
                self._ns["idle"] += self._take(now)
            ns = self._ns | {"under_way": max(now - self._shared_until, 0)}
            return Bill(self.price, ns, dict(self._tokens), self._num_ended)

    def unfinished(self) -> list[Account]:
        """Accounts that are not complete."""
        with self._lock:
            return list(self._accounts.values())


def nanoseconds(seconds: float) -> int:
    """A moment in whole nanoseconds, so that differences of moments add up."""
    return round(seconds * 1e9)
