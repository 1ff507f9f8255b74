"""Who pays for the device's time: each nanosecond is charged to a request or the operator. Part 19.

Promises, for any schedule, that the charged time and the time under way add up to the time since the meter's
start. No nanosecond is counted twice, and none is left out. Two rules ensure the sum:

- While there are no requests, the time is idle. All other time belongs to the step that ends next.
- The time of a step is shared among its requests by the work that each caused (shares.py).

If two steps overlap (Part 13), the second step has the time from the end of the first step to its own end.
The operator pays for idle time, failed steps, tokens computed again after a preemption, and work for requests
that had left when the step ended. Knows no HTTP and no files.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill, Price
from engine.telemetry.shares import Weights, Work, share_out, work_of


@dataclass(slots=True, eq=False)
class Account:
    """What one request of a user has used so far, all its n samples together."""

    request_id: str
    # Nanoseconds and tokens by kind (PAID_KINDS).
    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAID_KINDS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAID_KINDS, 0))
    open_samples: int = 0  # samples that have not ended
    reason: str | None = None  # finish reason of the sample that ended last

    @property
    def total_ns(self) -> int:
        """Nanoseconds of all kinds."""
        return sum(self.ns.values())


@dataclass(slots=True)
class MeteredSample:
    """A sample that has not ended, and what the meter has counted of the sample."""

    request: Request
    account: Account
    counts_prompt: bool = True  # true only for a request's first sample: all share one prompt
    cached: int = 0  # prompt tokens found in the cache
    reached: int = 0  # leading tokens that are computed or found in the cache, without rejected drafts
    num_output_tokens: int = 0  # output tokens counted so far


class CostMeter(Listener):
    """Measures from its construction on. The caller must add it to the engine's listeners at once.

    The engine's thread calls the `on_…` methods; any thread may call `read` and `unfinished`.
    """

    def __init__(
        self,
        price: Price,
        weights: Weights | None = None,
        api_price: ApiPrice | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`weights`: by default those of `Weights()`. `clock` returns seconds, and must be the clock of the
        engine's StepRecords.
        """
        self.price, self.api_price = price, api_price
        self.weights = Weights() if weights is None else weights
        self.closed: list[Callable[[Account], None]] = []  # called with each account once it is complete
        self._clock = clock
        self._lock = threading.Lock()  # between the engine's thread and readers
        self.started = self._now()  # in nanoseconds of `clock`
        self._charged_until = self.started  # all time before this moment is charged
        # kind -> nanoseconds. `read` computes `under_way`, which is not kept.
        self._ns = {kind: 0 for kind in (*PAID_KINDS, *UNPAID_KINDS) if kind != "under_way"}
        self._tokens = dict.fromkeys(PAID_KINDS, 0)
        self._num_ended = 0  # requests
        self._samples: dict[str, MeteredSample] = {}  # by the sample's id
        self._accounts: dict[str, Account] = {}  # by the request's id, until all its samples have ended

    def _now(self) -> int:
        """The time in nanoseconds of `clock`."""
        return nanoseconds(self._clock())

    def _take_uncharged(self, until: int) -> int:
        """Nanoseconds up to `until` that are not charged yet. They count as charged from now on."""
        new_ns = max(until - self._charged_until, 0)  # 0 if a step that overlaps has taken them
        self._charged_until += new_ns
        return new_ns

    # What the engine tells its listeners.

    def on_arrival(self, request: Request) -> None:
        """Start to meter a sample. All samples of a user's request share one account. If there was no other
        sample, the idle time ends now.
        """
        with self._lock:
            if not self._samples:
                self._ns["idle"] += self._take_uncharged(self._now())
            account = self._accounts.setdefault(request.request_id, Account(request.request_id))
            account.open_samples += 1
            request.stats.account = account
            self._samples[request.id] = MeteredSample(
                request, account, counts_prompt=account.open_samples == 1
            )

    def on_step(self, record: StepRecord) -> None:
        """Charge the uncharged time up to `record.end` (`_take_uncharged`).

        Holds `_lock`, because other threads read.

        1. If the step failed (`record.error`), charge all the time to the kind `failed` and change nothing
           else.
        2. Otherwise collect the (kind, weight) pairs of every sample in the step, from `_count_and_weigh`. A
           sample that is not in `_samples` has left: its kind is `late`, and its weight counts each computed
           token as an output token, plus each token held.
        3. Share the time by all these weights in one call of `share_out`, so that no nanosecond is lost.
        4. Add each share to `_ns`. If its kind is in PAID_KINDS, add the share to the sample's account, too.
        """
        with self._lock:
            new_ns = self._take_uncharged(nanoseconds(record.end))
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
                for kind, weight in self._count_and_weigh(sample, held - computed, held):
                    shares.append((kind, sample.account if kind in PAID_KINDS else None))
                    weights.append(weight)
            for (kind, account), ns in zip(shares, share_out(new_ns, weights), strict=True):
                self._ns[kind] += ns
                if account:
                    account.ns[kind] += ns

    def _count_and_weigh(self, sample: MeteredSample, start: int, end: int) -> list[tuple[str, int]]:
        """(kind, weight) pairs of the work of a step that computed tokens `start` to `end` - 1 of a sample.

        Also counts the sample's new tokens, in the account and in the totals.
        """
        num_prompt_tokens = sample.request.num_prompt_tokens
        num_output_tokens = len(sample.request.stats.token_times)
        computed_next_token = start == sample.reached and end == start + 1
        has_one_new_output = num_output_tokens == sample.num_output_tokens + 1
        if computed_next_token and has_one_new_output and start >= num_prompt_tokens:
            # A shortcut for the usual case, one more output token; the code below gives the same result.
            sample.reached, sample.num_output_tokens = end, num_output_tokens
            self._tokens["output"] += 1
            sample.account.tokens["output"] += 1
            return [("output", self.weights.output + end * self.weights.held)]
        # If the step begins after the last token reached, the cache has the tokens in between.
        num_newly_cached = max(start - sample.reached, 0)
        sample.cached += num_newly_cached
        sample.reached += num_newly_cached
        work = work_of(
            prompt=num_prompt_tokens,
            cached=sample.cached,
            reached=sample.reached,
            start=start,
            end=end,
            weights=self.weights,
        )
        self._count_new_tokens(sample, end, num_newly_cached)
        return [(kind, weight) for kind, weight in zip(Work._fields, work) if weight]

    def _count_new_tokens(self, sample: MeteredSample, end: int, num_newly_cached: int) -> None:
        """Count a sample's new tokens, in the account and in the totals, once its tokens before `end` are
        computed. `num_newly_cached`: prompt tokens that the cache had, and that are not counted yet.
        """
        request = sample.request
        num_output_tokens = len(request.stats.token_times)
        # Rejected drafts do not count (Part 16). The newest known token is chosen, and not computed yet.
        num_known = len(request.token_ids) - request.num_output_placeholders
        reached = max(sample.reached, min(end, num_known - 1))
        new_tokens = {
            "cached": num_newly_cached,
            "input": max(min(reached, request.num_prompt_tokens) - sample.reached, 0),
            "output": num_output_tokens - sample.num_output_tokens,
        }
        for kind, count in new_tokens.items():
            if count and (sample.counts_prompt or kind == "output"):
                self._tokens[kind] += count
                sample.account.tokens[kind] += count
        sample.reached, sample.num_output_tokens = reached, num_output_tokens

    def on_finish(self, request: Request) -> None:
        """When the last sample of a request ends, pass the complete account to each function in `closed`."""
        with self._lock:
            sample = self._samples.pop(request.id, None)
            if sample is None:  # the sample arrived before the meter listened
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
        """The bill as of now. The time of steps under way is `under_way`, which no request pays for yet."""
        with self._lock:
            now = self._now()
            if not self._samples:
                self._ns["idle"] += self._take_uncharged(now)
            ns = self._ns | {"under_way": max(now - self._charged_until, 0)}
            return Bill(self.price, ns, dict(self._tokens), self._num_ended)

    def unfinished(self) -> list[Account]:
        """Copies of the accounts of requests that have not ended: the accounts themselves go on to grow."""
        with self._lock:
            accounts = self._accounts.values()
            return [replace(each, ns=dict(each.ns), tokens=dict(each.tokens)) for each in accounts]


def nanoseconds(seconds: float) -> int:
    """A time in whole nanoseconds, so that differences between times add up exactly."""
    return round(seconds * 1e9)
