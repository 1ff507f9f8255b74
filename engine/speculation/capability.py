"""Speculative decoding, a capability of the engine: rejected drafts are cut, new ones proposed. Part 16.

Promises what rejection sampling promises; that drafts take only memory that is free and that no request needs
for its next token; and that none is proposed behind an output's last possible token. Steps run one ahead
(Part 13) while nothing is proposed; a step with drafts lands before the next is launched.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.requests.batch import Batch
from engine.requests.request import Request, State
from engine.requests.step import Step, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.speculation.lengths import DraftLengths
from engine.speculation.rejection_sampler import confirmed_tokens

CATCH_UP = 256  # tokens that a proposer may read in a step, beyond those of the last step
Text = tuple[Request, list[int]]  # a request, and all of its tokens that are known


class Proposer(Protocol):
    @property
    def max_positions(self) -> float:
        """It reads no text that is longer, in tokens."""

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many tokens of this text it has to read before it can propose what follows."""

    def propose(self, texts: Sequence[Text], max_tokens: Sequence[int]) -> list[list[int]]:
        """For each text at most so many tokens that may follow it; with 0 the text is only read."""


class NgramProposer:
    """A proposer without a memory: it looks at each text as it is, so it has nothing to read before."""

    max_positions = math.inf

    def __init__(self, find: Callable[[Sequence[int], int], list[int]]) -> None:
        """`find`: a text and a number of tokens -> at most so many that may follow, as `lookup` does."""
        self._find = find

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        return 0

    def propose(self, texts: Sequence[Text], max_tokens: Sequence[int]) -> list[list[int]]:
        return [self._find(ids, n) for (_, ids), n in zip(texts, max_tokens, strict=True)]


@dataclass
class Tally:
    """Counts since the start. A draft is one proposal for one request, of several tokens."""

    accepted_at: list[int]  # [K]: how often the token at this position of a draft was accepted
    drafts: int = 0
    proposed: int = 0  # tokens
    accepted: int = 0  # tokens

    def add(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` tokens, of which the first `accepted` were accepted."""
        if proposed:
            self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted
        for i in range(accepted):
            self.accepted_at[i] += 1


class Speculation:
    """A `Capability` of the engine. The runner's `select` must be a `RejectionSampler`."""

    def __init__(self, proposer: Proposer, scheduler: Scheduler, lengths: DraftLengths) -> None:
        self.proposer, self.scheduler, self.lengths = proposer, scheduler, lengths
        self.tally = Tally([0] * lengths.max_drafts)
        self._has_lent = False  # whether the scheduler has lent memory for drafts since it was given back

    def before_submit(self, step: Step) -> Batch:
        return step.batch

    def must_land_first(self, step: Step) -> bool:
        """Whether a request of the step has drafts (the step may have had no room for them), or something is
        to be proposed behind it. To propose takes its tokens, but how many there will be is known before.
        """
        counts = step.batch.rows.counts
        has_drafts = any(request.draft_ids for request in step.requests)
        return has_drafts or any(self._num_wanted(step.requests, counts))

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """The result with confirmed tokens only, with drafts behind them, and with counters. `drafts` is None
        for a step that was overlapped: the next step is under way already, without drafts.
        """
        # 1. Behind a draft that was rejected there is nothing.
        tokens, logprobs = result.tokens, result.logprobs
        if step.batch.has_drafts:
            tokens = [confirmed_tokens(*pair) for pair in zip(tokens, drafts_of(step.batch), strict=True)]
            logprobs = logprobs and [
                scores[: len(confirmed)] for scores, confirmed in zip(logprobs, tokens, strict=True)
            ]
        # 2. What became of each request's drafts.
        self._forget_requests()
        proposed_before, accepted_before = self.tally.proposed, self.tally.accepted
        if step.batch.has_drafts:
            self._count(step.requests, result.tokens, tokens)
        else:
            self.lengths.observe_plain_step(sum(1 for token_ids in tokens if token_ids))
        counters = {
            "draft_tokens": float(self.tally.proposed - proposed_before),
            "accepted_tokens": float(self.tally.accepted - accepted_before),
        }
        # 3. New drafts, once the memory of rejected ones is given back.
        self._give_back(step.requests, tokens)
        return replace(
            result,
            tokens=tokens,
            logprobs=logprobs,
            drafts=None if step.overlapped else self._propose(step.requests, tokens),
            counters=(result.counters or {}) | counters,
        )

    def _forget_requests(self) -> None:
        """Have `lengths` forget requests that have left, once it knows twice as many as there are."""
        queues = self.scheduler.running, self.scheduler.waiting
        if self.lengths.num_requests > 2 * sum(map(len, queues)):
            self.lengths.retain({request.id for queue in queues for request in queue})

    def _count(
        self, requests: Sequence[Request], sampled: Sequence[list[int]], confirmed: Sequence[list[int]]
    ) -> None:
        """Count the drafts of a step: of the tokens of each request's rows, those that were confirmed."""
        for request, rows, tokens in zip(requests, sampled, confirmed, strict=True):
            if rows and request.state is not State.FINISHED:  # else it ended while this step was in flight
                num_proposed, num_accepted = len(rows) - 1, len(tokens) - 1
                self.lengths.observe(request.id, num_proposed, num_accepted)
                self.tally.add(num_proposed, num_accepted)

    def _give_back(self, requests: Sequence[Request], tokens: Sequence[list[int]]) -> None:
        """Give back memory that was lent for drafts, beyond each request's known and confirmed tokens."""
        if self._has_lent:
            for request, confirmed in zip(requests, tokens, strict=True):
                if request.state is State.RUNNING:
                    known = len(request.token_ids) - request.num_output_placeholders
                    self.scheduler.take_back(request, known + len(confirmed))
        self._has_lent = False

    def _num_wanted(self, requests: Sequence[Request], num_new: Sequence[int]) -> list[int]:
        """[S]: how many tokens to propose for each request, after a step that brings it num_new[S] tokens."""
        wanted = [0] * len(requests)
        # In most steps drafts pay for no request, even if each may have the most. Then caps do not matter.
        decoding = [request.id for request, count in zip(requests, num_new, strict=True) if count]
        if not any(self.lengths.choose(decoding, [self.lengths.max_drafts] * len(decoding))):
            return wanted
        caps = [self.cap(request, count) for request, count in zip(requests, num_new, strict=True)]
        continuing = [s for s, cap in enumerate(caps) if cap is not None]
        lengths = self.lengths.choose(
            [requests[s].id for s in continuing], [caps[s] or 0 for s in continuing]
        )
        for s, k in zip(continuing, lengths, strict=True):
            wanted[s] = k
        return wanted

    def cap(self, request: Request, num_new: int) -> int | None:
        """How many tokens may be proposed at most, after a step that brings the request `num_new` tokens.
        None: its prompt is not complete, these are its last tokens, or it runs no longer.
        """
        num_left = request.output.limit - len(request.output.token_ids) - num_new
        if not num_new or num_left < 1 or request.state is not State.RUNNING:
            return None
        return min(self.lengths.max_drafts, num_left - 1)  # the step after it gives one token anyway

    def _propose(self, requests: Sequence[Request], tokens: Sequence[list[int]]) -> list[list[int]]:
        """[S]: drafts for each request, behind its confirmed tokens of this step."""
        drafts: list[list[int]] = [[] for _ in tokens]
        # 1. Who continues, and how many tokens to propose behind the one that the next step gives anyway.
        num_new = [0 if _ends(r, new) else len(new) for r, new in zip(requests, tokens, strict=True)]
        wanted = self._num_wanted(requests, num_new)
        if not any(wanted):  # the proposer reads nothing, and has more to read later
            return drafts
        # 2. Memory for the next token of each request; then for drafts, where there is some for all of them.
        continuing = [
            s for s, count in enumerate(num_new) if count and self.cap(requests[s], count) is not None
        ]
        ids = {s: [*requests[s].token_ids, *tokens[s]] for s in continuing}  # all known tokens
        has_room = {s: self.scheduler.lend(requests[s], len(ids[s])) for s in continuing}
        self._has_lent = True
        work: list[tuple[int, Text, int]] = []
        for s in continuing:
            k = int(min(wanted[s], self.proposer.max_positions - len(ids[s])))
            if k > 0 and has_room[s] and self.scheduler.lend(requests[s], len(ids[s]) + k):
                work.append((s, (requests[s], ids[s]), k))
        # 3. A proposer that was not asked for long has much to read, and does so over several steps.
        backlog = [max(0, self.proposer.unread(*text) - (self.lengths.max_drafts + 1)) for _, text, _ in work]
        self.lengths.observe_proposals(min(CATCH_UP, sum(backlog)))
        work = list(_within_catch_up(work, backlog))
        proposals = self.proposer.propose([text for _, text, _ in work], [k for *_, k in work])
        for (s, (request, _), k), proposal in zip(work, proposals, strict=True):
            drafts[s] = proposal
            if k and not proposal:  # no token was proposed: counts as a draft that was rejected
                self.lengths.observe(request.id, 1, 0)
        return drafts


def drafts_of(batch: Batch) -> Iterator[list[int]]:
    """Of each sequence: the drafts that the step verifies, which are the tokens behind its first row."""
    row = 0
    for count in batch.rows.counts:
        chosen = batch.rows.chosen[row : row + max(0, count - 1)]
        yield [batch.token_ids[t + 1] for t in chosen]  # the draft is the token behind the row's
        row += count


def _ends(request: Request, tokens: Sequence[int]) -> bool:
    """Whether its output ends with these tokens, by a stop token or because there is none (NO_TOKEN)."""
    return any(token_id < 0 or token_id in request.sampling.stop_ids for token_id in tokens)


def _within_catch_up(
    work: list[tuple[int, Text, int]], backlog: list[int]
) -> Iterator[tuple[int, Text, int]]:
    """The part of `work` that reads at most CATCH_UP tokens of backlog, in order: of a text whose backlog is
    longer than what the budget has left, a piece is read, and nothing is proposed for it.
    """
    budget = CATCH_UP
    for (s, (request, ids), k), num_unread in zip(work, backlog, strict=True):
        if num_unread <= budget:
            yield s, (request, ids), k
        elif budget:
            yield s, (request, ids[: len(ids) - num_unread + budget]), 0
        budget -= min(num_unread, budget)
