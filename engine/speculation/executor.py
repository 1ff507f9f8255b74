"""An executor whose steps bring several tokens of a sequence at once, and proposals for the next. Part 16.

Promises what verification promises; that proposals take only memory that is free and that nobody's next token
needs; and that none is made behind an output's last possible token. Wraps another executor, whose sampler
must be a `Verifier`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.batch import Batch
from engine.cache.manager import KVCacheManager
from engine.executor import Executor, Pending, StepResult
from engine.scheduling.request import Request
from engine.speculation.lengths import Lengths
from engine.speculation.verify import SKIPPED

Text = tuple[Request, list[int]]  # a request, and all of its tokens that are known


class Proposer(Protocol):
    max_positions: float  # it reads no text that is longer

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """At most so many tokens for each; 0 for a prompt that is still being read."""


class Lookup:
    """A proposer that has no memory: it looks at each text alone."""

    max_positions = math.inf

    def __init__(self, find: Callable[[Sequence[int], int], list[int]]) -> None:
        self._find = find

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        return [self._find(ids, n) if n else [] for (_, ids), n in zip(texts, most, strict=True)]


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

    def __init__(self, inner: Executor, cache: KVCacheManager, proposer: Proposer, lengths: Lengths) -> None:
        self.inner, self.cache, self.proposer, self.lengths = inner, cache, proposer, lengths
        self.tally = Tally([0] * lengths.most)

    def submit(self, batch: Batch) -> "SpeculativePending":
        start = time.perf_counter()
        return SpeculativePending(self, batch, self.inner.submit(batch), start)

    def landed(self, batch: Batch, result: StepResult, seconds: float) -> StepResult:
        """The tokens that stand, what is proposed behind them, and how it went."""
        # 1. Behind a draft that was not accepted there is nothing.
        tokens = [own[: own.index(SKIPPED)] if SKIPPED in own else own for own in result.tokens]
        logprobs = result.logprobs and [
            scores[: len(own)] for scores, own in zip(result.logprobs, tokens, strict=True)
        ]
        proposed = accepted = 0
        for request, before, after in zip(batch.requests, result.tokens, tokens, strict=True):
            if before:
                self.lengths.observe(request.id, len(before) - 1, len(after) - 1)
                self.tally.add(len(before) - 1, len(after) - 1)
                proposed, accepted = proposed + len(before) - 1, accepted + len(after) - 1
        if all(before for before in result.tokens):  # no prompt was read
            self.lengths.step.add(batch.num_tokens, seconds)
        drafts = self._propose(batch, tokens)
        counters = {"draft_tokens": float(proposed), "accepted_tokens": float(accepted)}
        return replace(
            result,
            tokens=tokens,
            logprobs=logprobs,
            drafts=drafts,
            counters=(result.counters or {}) | counters,
        )

    def _propose(self, batch: Batch, tokens: list[list[int]]) -> list[list[int]]:
        """[S]: proposals for whoever goes on."""
        # 1. Who goes on, and how many tokens may come at most behind the one that the next step gives anyway.
        caps = [self._cap(request, own) for request, own in zip(batch.requests, tokens, strict=True)]
        decoding = [s for s, cap in enumerate(caps) if cap is not None]
        chosen = self.lengths.choose([batch.requests[s].id for s in decoding], [caps[s] for s in decoding])
        most = dict(zip(decoding, chosen, strict=True))
        # 2. Everybody's next token first: there is room for it, or nothing is proposed. Then for guesses.
        read: list[int] = []
        texts, wanted = [], []
        for s, (request, own) in enumerate(zip(batch.requests, tokens, strict=True)):
            ids = [*request.token_ids, *own] if own else request.token_ids[: batch.context_lens[s]]
            goes_on = s in most or not own
            if goes_on and len(ids) <= self.proposer.max_positions and self.cache.reserve(request, len(ids)):
                read.append(s)
                texts.append((request, ids))
        for s, (request, ids) in zip(read, texts, strict=True):
            k = max(0, min(most.get(s, 0), self.proposer.max_positions - len(ids)))
            wanted.append(k if k and self.cache.reserve(request, len(ids) + k) else 0)
        drafts: list[list[int]] = [[] for _ in tokens]
        if texts:
            start = time.perf_counter()
            made = self.proposer.propose(texts, wanted)
            if max(wanted) and len(read) == len(decoding):
                self.lengths.draft.add(len(read), (time.perf_counter() - start) / max(wanted))
            for s, own in zip(read, made, strict=True):
                drafts[s] = own
        return drafts

    def _cap(self, request: Request, own: list[int]) -> int | None:
        """None: its prompt is still being read, or these tokens are its last."""
        left = request.output.limit - len(request.output.token_ids) - len(own)
        if not own or left < 1 or own[-1] < 0 or own[-1] in request.sampling.stop_ids:
            return None
        return min(self.lengths.most, left - 1)


@dataclass(frozen=True)
class SpeculativePending:
    """A step under way."""

    executor: SpeculativeExecutor
    batch: Batch
    pending: Pending
    start: float

    def result(self) -> StepResult:
        result = self.pending.result()
        return self.executor.landed(self.batch, result, time.perf_counter() - self.start)
