"""Speculative decoding as a capability of the engine: drops rejected drafts, and proposes new ones. Part 16.

The output has the guarantees of rejection sampling (engine/speculation/rejection_sampler.py). Drafts take
only free memory that no request needs for its next token. No draft is proposed behind an output's last
possible token. Steps run one ahead (Part 13) while nothing is proposed; a step with drafts lands before the
next step is launched.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.requests.batch import Batch
from engine.requests.request import Request, State
from engine.requests.step import Step, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.speculation.lengths import DraftLengths
from engine.speculation.rejection_sampler import confirmed_tokens

CATCH_UP = 256  # the most tokens that a proposer reads in a step, besides those of the last step


class ProposerInput(NamedTuple):
    """What a proposer gets for one request."""

    request: Request
    # The text: all known tokens of prompt and output, or the first of them (`_within_catch_up`).
    ids: list[int]
    max_tokens: int  # how many tokens to propose at most; with 0, the proposer only reads the text


class Proposer(Protocol):
    """Proposes the tokens that may follow a text."""

    @property
    def max_positions(self) -> float:
        """The length, in tokens, of the longest text that the proposer reads; may be infinite."""

    def num_unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many tokens of the text `ids` the proposer must read before it can propose the next."""

    def propose(self, inputs: Sequence[ProposerInput]) -> list[list[int]]:
        """inputs[n] -> [n]: for each text, at most `max_tokens` tokens that may follow it."""


class NgramProposer:
    """A `Proposer` that looks up each whole text anew, so it has no unread tokens."""

    max_positions = math.inf

    def __init__(self, find: Callable[[Sequence[int], int], list[int]]) -> None:
        """`find(ids, n)` returns at most n tokens that may follow the text `ids`, as `lookup` does."""
        self._find = find

    def num_unread(self, request: Request, ids: Sequence[int]) -> int:
        return 0

    def propose(self, inputs: Sequence[ProposerInput]) -> list[list[int]]:
        return [self._find(item.ids, item.max_tokens) for item in inputs]


@dataclass
class Tally:
    """Counts since the start. Here a draft is one proposal for one request, of one or more tokens."""

    accepted_at: list[int]  # [max_drafts]: by position in a draft, how often the token there was accepted
    drafts: int = 0
    proposed: int = 0  # tokens
    accepted: int = 0  # tokens

    def add(self, proposed: int, accepted: int) -> None:
        """Count a draft of `proposed` tokens, of which the first `accepted` were accepted. 0 proposed tokens
        are no draft, and change nothing.
        """
        if not proposed:
            return
        self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted
        for i in range(accepted):
            self.accepted_at[i] += 1


class Speculation:
    """A `Capability` of the engine, where methods without a docstring are described. The runner's `select`
    must be a `RejectionSampler`.
    """

    def __init__(self, proposer: Proposer, scheduler: Scheduler, lengths: DraftLengths) -> None:
        self.proposer, self.scheduler, self.lengths = proposer, scheduler, lengths
        self.tally = Tally([0] * lengths.max_drafts)
        self._has_lent = False  # whether the scheduler has lent memory for drafts that is not given back

    def before_submit(self, step: Step) -> Batch:
        return step.batch

    def must_land_first(self, step: Step) -> bool:
        """Whether a request of the step has drafts (even drafts for which the step had no room), or drafts
        are to be proposed after the step: the proposer needs the step's tokens.
        """
        counts = step.batch.rows.chosen_counts
        has_drafts = any(request.draft_ids for request in step.requests)
        return has_drafts or any(self._num_wanted(step.requests, counts).values())

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """The result with confirmed tokens only, with new drafts, and with counters. `drafts` is None for a
        step that was overlapped, since the next step is in flight already, without drafts.
        """
        # 1. Drop the tokens behind the first rejected draft.
        tokens, logprobs = result.tokens, result.logprobs
        if step.batch.has_drafts:
            tokens = []
            for sampled, drafts in zip(result.tokens, drafts_of(step.batch), strict=True):
                tokens.append(confirmed_tokens(sampled, drafts))
            if logprobs:
                logprobs = [scores[: len(ids)] for scores, ids in zip(logprobs, tokens, strict=True)]
        # 2. Count each request's accepted and rejected drafts.
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
        # 3. Give back the memory of rejected drafts, then propose new ones.
        self._give_back(step.requests, tokens)
        return replace(
            result,
            tokens=tokens,
            logprobs=logprobs,
            drafts=None if step.overlapped else self._propose(step.requests, tokens),
            counters=(result.counters or {}) | counters,
        )

    def _forget_requests(self) -> None:
        """Have `lengths` forget finished requests, once it knows more than twice as many requests as there
        are: to look for them in every step would take longer.
        """
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self.lengths.num_requests > 2 * (len(running) + len(waiting)):
            self.lengths.retain({request.id for request in [*running, *waiting]})

    def _count(
        self, requests: Sequence[Request], sampled: Sequence[list[int]], confirmed: Sequence[list[int]]
    ) -> None:
        """Count the drafts of a step. sampled[S] are the tokens of each request's rows, and confirmed[S] the
        first of these that were confirmed.
        """
        for request, sampled_ids, confirmed_ids in zip(requests, sampled, confirmed, strict=True):
            has_finished = request.state is State.FINISHED  # it may have ended while this step was in flight
            if sampled_ids and not has_finished:
                num_proposed, num_accepted = len(sampled_ids) - 1, len(confirmed_ids) - 1
                self.lengths.observe(request.id, num_proposed, num_accepted)
                self.tally.add(num_proposed, num_accepted)

    def _give_back(self, requests: Sequence[Request], tokens: Sequence[list[int]]) -> None:
        """Give back the memory lent for drafts: all beyond each request's known and confirmed tokens."""
        if self._has_lent:
            for request, confirmed in zip(requests, tokens, strict=True):
                if request.state is State.RUNNING:
                    known = len(request.token_ids) - request.num_output_placeholders
                    self.scheduler.take_back(request, known + len(confirmed))
        self._has_lent = False

    def _num_wanted(self, requests: Sequence[Request], num_new: Sequence[int]) -> dict[int, int]:
        """How many tokens to propose for each request that continues after a step, by its index in
        `requests`. The step gives request s num_new[s] tokens. Empty if drafts pay for no request.
        """
        # 1. In most steps drafts pay for no request, even without caps. Then the caps need not be computed.
        decoding = [request.id for request, count in zip(requests, num_new, strict=True) if count]
        if not any(self.lengths.choose(decoding, [self.lengths.max_drafts] * len(decoding))):
            return {}
        # 2. Otherwise choose again, by the caps of the requests that continue.
        caps: dict[int, int] = {}  # by index of a request that continues
        for s, (request, count) in enumerate(zip(requests, num_new, strict=True)):
            cap = self._cap(request, count)
            if cap is not None:
                caps[s] = cap
        lengths = self.lengths.choose([requests[s].id for s in caps], list(caps.values()))
        return dict(zip(caps, lengths, strict=True))

    def _cap(self, request: Request, num_new: int) -> int | None:
        """The most tokens that may be proposed after a step that gives the request `num_new` tokens. None if
        the request does not continue: its prompt is not complete, these are its last tokens, or it does not
        run any more.
        """
        num_left = request.output.limit - len(request.output.token_ids) - num_new
        if not num_new or num_left < 1 or request.state is not State.RUNNING:
            return None
        return min(self.lengths.max_drafts, num_left - 1)  # the next step gives one token besides the drafts

    def _propose(self, requests: Sequence[Request], tokens: Sequence[list[int]]) -> list[list[int]]:
        """[S]: drafts for each request, which follow its confirmed tokens tokens[S] of this step."""
        drafts: list[list[int]] = [[] for _ in tokens]
        # 1. Find the requests that continue, and how many tokens to propose for each.
        num_new: list[int] = []  # [S]: the tokens of each request in this step; 0 if it ends with them
        for request, new_ids in zip(requests, tokens, strict=True):
            num_new.append(0 if _ends(request, new_ids) else len(new_ids))
        wanted = self._num_wanted(requests, num_new)
        if not any(wanted.values()):  # the proposer reads nothing now, and has more to read later
            return drafts
        # 2. Reserve memory for the drafts.
        inputs: dict[int, ProposerInput] = {}  # by index in `requests`
        for s, num_tokens in wanted.items():
            ids = [*requests[s].token_ids, *tokens[s]]
            max_tokens = int(min(num_tokens, self.proposer.max_positions - len(ids)))
            inputs[s] = ProposerInput(requests[s], ids, max_tokens)
        inputs = self._reserve_memory(inputs)
        # 3. Propose. A proposer with much to read, because drafts did not pay for long, reads it in several
        #    steps. The tokens of one step, max_drafts + 1 at most, do not count as such a backlog.
        step_tokens = self.lengths.max_drafts + 1
        backlog: dict[int, int] = {}  # by index, in tokens
        for s, item in inputs.items():
            backlog[s] = max(0, self.proposer.num_unread(item.request, item.ids) - step_tokens)
        self.lengths.observe_proposals(min(CATCH_UP, sum(backlog.values())))
        inputs = _within_catch_up(inputs, backlog)
        proposals = self.proposer.propose(list(inputs.values()))
        for (s, item), proposal in zip(inputs.items(), proposals, strict=True):
            drafts[s] = proposal
            if item.max_tokens and not proposal:  # a proposal without a token counts as one rejected draft
                self.lengths.observe(item.request.id, proposed=1, accepted=0)
        return drafts

    def _reserve_memory(self, inputs: Mapping[int, ProposerInput]) -> dict[int, ProposerInput]:
        """Reserve memory for the drafts of `inputs`. Returns those for whose drafts there is room, with their
        keys.

        Memory for the known tokens of each request, which the next step needs, is reserved first. Then memory
        for a request's drafts is reserved, if there is room for all of them.
        """
        self._has_lent = True
        with_room: dict[int, ProposerInput] = {}  # with room for all known tokens
        for s, item in inputs.items():
            if self.scheduler.lend(item.request, len(item.ids)):
                with_room[s] = item
        reserved: dict[int, ProposerInput] = {}
        for s, item in with_room.items():
            num_tokens = len(item.ids) + item.max_tokens
            if item.max_tokens > 0 and self.scheduler.lend(item.request, num_tokens):
                reserved[s] = item
        return reserved


def drafts_of(batch: Batch) -> Iterator[list[int]]:
    """For each sequence, the drafts that the step verifies: the tokens of all its rows but the first."""
    row = 0
    for count in batch.rows.chosen_counts:
        chosen = batch.rows.chosen[row : row + max(0, count - 1)]
        yield [batch.token_ids[t + 1] for t in chosen]  # the draft follows the row's own token
        row += count


def _ends(request: Request, tokens: Sequence[int]) -> bool:
    """Whether the request ends with these tokens: one is a stop token, or NO_TOKEN, which is below 0."""
    return any(token_id < 0 or token_id in request.sampling.stop_ids for token_id in tokens)


def _within_catch_up(
    inputs: Mapping[int, ProposerInput], backlog: Mapping[int, int]
) -> dict[int, ProposerInput]:
    """Those inputs that the proposer reads now: all without a backlog, and the others, in order, until they
    have a backlog of CATCH_UP tokens together. The text that exceeds this budget is cut, and no token is
    proposed for it. `backlog` has the keys of `inputs`, and so has the result.
    """
    budget = CATCH_UP
    within: dict[int, ProposerInput] = {}
    for s, item in inputs.items():
        if backlog[s] <= budget:
            within[s] = item
        elif budget:
            num_kept = len(item.ids) - backlog[s] + budget
            within[s] = item._replace(ids=item.ids[:num_kept], max_tokens=0)
        budget = max(0, budget - backlog[s])
    return within
