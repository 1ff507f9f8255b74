"""An executor whose steps bring several tokens of a sequence at once, and proposals for the next. Part 16.

Promises what verification promises; that proposals take only memory that is free and that nobody's next token
needs; and that none is made behind an output's last possible token. Wraps another executor, whose sampler
must be a `Verifier`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.batch import Batch
from engine.cache.manager import KVCacheManager
from engine.executor import Executor, Pending, StepResult
from engine.scheduling.request import Request, State
from engine.speculation.lengths import Lengths
from engine.speculation.verify import SKIPPED, has_drafts

CATCH_UP = 256  # tokens that a proposer reads in a step beside those that the last one brought
Text = tuple[Request, list[int]]  # a request, and all of its tokens that are known


class Proposer(Protocol):
    max_positions: float  # it reads no text that is longer

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many tokens of this text it has to read before it can propose what comes behind."""

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """At most so many tokens for each; with 0 the text is only read."""


class Lookup:
    """A proposer that has no memory: it looks at each text alone."""

    max_positions = math.inf

    def __init__(self, find: Callable[[Sequence[int], int], list[int]]) -> None:
        self._find = find

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        return 0

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        return [self._find(ids, n) for (_, ids), n in zip(texts, most, strict=True)]


@dataclass
class Tally:
    """Since the start. `accepted_at[i]`: how often the i-th draft of a row of them stood."""

    accepted_at: list[int]
    drafts: int = 0  # how often something was proposed
    proposed: int = 0  # tokens
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        self.drafts += proposed > 0
        self.proposed += proposed
        self.accepted += accepted
        for i in range(accepted):
            self.accepted_at[i] += 1


class SpeculativeExecutor:
    """Verify what was proposed, then propose."""

    def __init__(
        self,
        inner: Executor,
        cache: KVCacheManager,
        proposer: Proposer,
        lengths: Lengths,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` says what steps cost. Where this thread does the work, `time.thread_time` leaves out the
        time in which others had the processor.
        """
        self.clock = clock
        self.inner, self.cache, self.proposer, self.lengths = inner, cache, proposer, lengths
        self.tally = Tally([0] * lengths.most)
        self._proposing = 0.0  # seconds, behind the last step
        self._lent = False  # whether room was taken for guesses

    def submit(self, batch: Batch) -> "SpeculativePending":
        start = self.clock()
        return SpeculativePending(self, batch, self.inner.submit(batch), start)

    def landed(
        self, batch: Batch, result: StepResult, seconds: float, wanted: Sequence[int] | None = None
    ) -> StepResult:
        """The tokens that stand, what is proposed behind them, and how it went.

        `wanted`[S]: how many tokens to propose, where that is settled already. If it is nothing at all, the
        next step may be under way, with these tokens in it: then `drafts` is None.
        """
        # 1. Behind a draft that was not accepted there is nothing.
        tokens, logprobs = result.tokens, result.logprobs
        if has_drafts(batch):
            tokens = [own[: own.index(SKIPPED)] if SKIPPED in own else own for own in tokens]
            logprobs = logprobs and [s[: len(own)] for s, own in zip(logprobs, tokens, strict=True)]
        # 2. What became of each request's drafts, and how long it took.
        proposed = accepted = 0
        for request, before, after in zip(batch.requests, result.tokens, tokens, strict=True):
            if before and request.state is not State.FINISHED:  # else it was launched once too often
                self.lengths.observe(request.id, len(before) - 1, len(after) - 1)
                self.tally.add(len(before) - 1, len(after) - 1)
                proposed, accepted = proposed + len(before) - 1, accepted + len(after) - 1
        people, rows = sum(map(bool, tokens)), sum(map(len, result.tokens))
        if rows == batch.num_tokens:  # no prompt was read
            self.lengths.stepped(people, rows, seconds)
        else:
            seconds = math.inf
        # 3. What is proposed behind them, once the room of guesses that did not stand is given back.
        if self._lent:
            for request, own in zip(batch.requests, tokens, strict=True):
                if request.state is State.RUNNING:
                    known = len(request.token_ids) - request.num_expected
                    self.cache.trim(request, known + len(own))
        self._proposing, self._lent = 0.0, False
        drafts = None
        if wanted is None or any(wanted):
            drafts = self._propose(batch, tokens, wanted)
        if people:
            told = sum(map(len, tokens))
            self.lengths.account(people, rows, told, seconds, self._proposing)
        counters = {"draft_tokens": float(proposed), "accepted_tokens": float(accepted)}
        return replace(
            result,
            tokens=tokens,
            logprobs=logprobs,
            drafts=drafts,
            counters=(result.counters or {}) | counters,
        )

    def choose(self, batch: Batch, caps: Sequence[int | None]) -> list[int]:
        """[S]: how many tokens to propose for each, at most its cap; where that is None, none."""
        wanted, going = [0] * len(caps), [s for s, cap in enumerate(caps) if cap is not None]
        lengths = self.lengths.choose([batch.requests[s].id for s in going], [caps[s] for s in going])
        self.lengths.chose(any(lengths))
        for s, k in zip(going, lengths, strict=True):
            wanted[s] = k
        return wanted

    def _propose(
        self, batch: Batch, tokens: list[list[int]], wanted: Sequence[int] | None
    ) -> list[list[int]]:
        """[S]: proposals for whoever goes on."""
        drafts: list[list[int]] = [[] for _ in tokens]
        if wanted is None and not self.lengths.asks(sum(map(bool, tokens))):
            return drafts
        # 1. Who goes on, and how many tokens may come at most behind the one that the next step gives anyway.
        caps = [
            None if _ends(request, own) else self.cap(request, len(own))
            for request, own in zip(batch.requests, tokens, strict=True)
        ]
        if wanted is None:
            wanted = self.choose(batch, caps)
        going = [s for s, cap in enumerate(caps) if cap is not None]
        lengths = [min(wanted[s], caps[s]) for s in going]
        if not any(lengths):  # nobody: the proposer falls behind, and that costs nothing
            return drafts
        # 2. Everybody's next token first: there is room for it, or nothing is proposed. Then for guesses.
        requests = [batch.requests[s] for s in going]
        known = [[*request.token_ids, *tokens[s]] for s, request in zip(going, requests, strict=True)]
        fits = [self.cache.reserve(request, len(ids)) for request, ids in zip(requests, known, strict=True)]
        work: list[tuple[int, Text, int]] = []
        self._lent = True
        for s, request, ids, k, fit in zip(going, requests, known, lengths, fits, strict=True):
            k = min(k, self.proposer.max_positions - len(ids))
            if k > 0 and fit and self.cache.reserve(request, len(ids) + k):
                work.append((s, (request, ids), k))
        # 3. Who has not been asked for long is far behind, and catches up by and by.
        late = [max(0, self.proposer.unread(*text) - (self.lengths.most + 1)) for _, text, _ in work]
        work = list(_in_reach(work, late))
        start = self.clock()
        made = self.proposer.propose([text for _, text, _ in work], [k for *_, k in work])
        seconds, passes = self.clock() - start, max((k for *_, k in work), default=0)
        if passes and not any(late):  # to read a text's beginning is not what a proposal costs
            self.lengths.draft.add(len(work), seconds / passes)
            seconds = min(seconds, passes * self.lengths.draft.seen(len(work)))
        self._proposing = seconds
        for (s, (request, _), k), own in zip(work, made, strict=True):
            drafts[s] = own
            if k and not own:
                self.lengths.found_nothing(request.id)
        return drafts

    def cap(self, request: Request, new: int) -> int | None:
        """How many may be proposed at most, if a step brings it so many tokens. None: its prompt is still
        being read, or these are its last, or it has left the running ones.
        """
        left = request.output.limit - len(request.output.token_ids) - new
        if not new or left < 1 or request.state is not State.RUNNING:
            return None
        return min(self.lengths.most, left - 1)


def _ends(request: Request, own: list[int]) -> bool:
    """Whether its output ends with these tokens, by a stop token or because there is none."""
    return any(token_id < 0 or token_id in request.sampling.stop_ids for token_id in own)


def _in_reach(work: list[tuple[int, Text, int]], late: list[int]) -> Iterator[tuple[int, Text, int]]:
    """`work`, but of who is `late`, CATCH_UP tokens altogether: a piece of the text, and no proposal."""
    left = CATCH_UP
    for (s, (request, ids), k), behind in zip(work, late, strict=True):
        if behind <= left:
            yield s, (request, ids), k
        elif left:
            yield s, (request, ids[: len(ids) - behind + left]), 0
        left -= min(behind, left)


@dataclass(frozen=True)
class SpeculativePending:
    """A step under way."""

    executor: SpeculativeExecutor
    batch: Batch
    pending: Pending
    start: float

    def result(self) -> StepResult:
        result = self.pending.result()
        return self.executor.landed(self.batch, result, self.executor.clock() - self.start)
