"""Speculation on the host: what stood is kept, and something is proposed for the next step. Part 16.

Promises what rejection sampling promises; that proposals take only memory that is free and that nobody's next
token needs; and that none is made behind an output's last possible token. A capability of the engine's loop:
steps run one ahead (Part 13) while nothing is proposed, and one with drafts is alone on the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.requests.batch import Batch
from engine.requests.request import Request, State
from engine.requests.step import Step, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.speculation.lengths import Lengths
from engine.speculation.rejection_sampler import standing

CATCH_UP = 256  # tokens that a proposer reads in a step beside those that the last one brought
Text = tuple[Request, list[int]]  # a request, and all of its tokens that are known


class Proposer(Protocol):
    @property
    def max_positions(self) -> float:
        """It reads no text that is longer."""

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many tokens of this text it has to read before it can propose what comes behind."""

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """At most so many tokens for each; with 0 the text is only read."""


class NgramProposer:
    """A proposer that has no memory: it looks at each text alone."""

    max_positions = math.inf

    def __init__(self, find: Callable[[Sequence[int], int], list[int]]) -> None:
        """`find`: a text and a number of tokens -> at most so many that may follow, as `lookup` does."""
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


class Speculation:
    """Cut what did not stand, then propose. The runner's `select` must be a `RejectionSampler`."""

    def __init__(self, proposer: Proposer, scheduler: Scheduler, lengths: Lengths) -> None:
        self.proposer, self.scheduler, self.lengths = proposer, scheduler, lengths
        self.tally = Tally([0] * lengths.most)
        self._lent = False  # whether room was taken for guesses

    def before_submit(self, step: Step) -> Batch:
        return step.batch

    def must_land_first(self, step: Step) -> bool:
        """A step with drafts does, and one behind which something is to be proposed: that takes its tokens,
        of which it is known beforehand how many there are.
        """
        counts = step.batch.rows.counts
        return step.batch.has_drafts or any(self._wanted(step.requests, counts))

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """The tokens that stand, what is proposed behind them, and how it went. Of a step that was overtaken
        the next is under way, with these tokens in it: then `drafts` is None.
        """
        # 1. Behind a draft that was not accepted there is nothing.
        tokens, logprobs = result.tokens, result.logprobs
        if step.batch.has_drafts:
            tokens = [standing(*pair) for pair in zip(tokens, drafts_of(step.batch), strict=True)]
            logprobs = logprobs and [s[: len(kept)] for s, kept in zip(logprobs, tokens, strict=True)]
        # 2. What became of each request's drafts. Now and then, those that have left are forgotten.
        queues = self.scheduler.running, self.scheduler.waiting
        if self.lengths.num_requests > 2 * sum(map(len, queues)):
            self.lengths.retain({request.id for queue in queues for request in queue})
        proposed = accepted = 0
        if step.batch.has_drafts:
            for request, before, after in zip(step.requests, result.tokens, tokens, strict=True):
                if before and request.state is not State.FINISHED:  # else it was launched once too often
                    self.lengths.observe(request.id, len(before) - 1, len(after) - 1)
                    self.tally.add(len(before) - 1, len(after) - 1)
                    proposed, accepted = proposed + len(before) - 1, accepted + len(after) - 1
        else:
            self.lengths.passed(sum(map(bool, tokens)))
        # 3. What is proposed behind them, once the room of guesses that did not stand is given back.
        if self._lent:
            for request, kept in zip(step.requests, tokens, strict=True):
                if request.state is State.RUNNING:
                    known = len(request.token_ids) - request.num_output_placeholders
                    self.scheduler.take_back(request, known + len(kept))
        self._lent = False
        drafts = None if step.overlapped else self._propose(step.requests, tokens)
        counters = {"draft_tokens": float(proposed), "accepted_tokens": float(accepted)}
        return replace(
            result,
            tokens=tokens,
            logprobs=logprobs,
            drafts=drafts,
            counters=(result.counters or {}) | counters,
        )

    def _wanted(self, requests: Sequence[Request], new: Sequence[int]) -> list[int]:
        """[S]: how many tokens to propose for each, once a step has brought it so many."""
        wanted = [0] * len(requests)
        # Mostly drafts pay for nobody, however many they might be. Then it does not matter how many may be.
        decoding = [request.id for request, count in zip(requests, new, strict=True) if count]
        if not any(self.lengths.choose(decoding, [self.lengths.most] * len(decoding))):
            return wanted
        caps = [self.cap(request, count) for request, count in zip(requests, new, strict=True)]
        going = [s for s, cap in enumerate(caps) if cap is not None]
        lengths = self.lengths.choose([requests[s].id for s in going], [caps[s] or 0 for s in going])
        for s, k in zip(going, lengths, strict=True):
            wanted[s] = k
        return wanted

    def cap(self, request: Request, new: int) -> int | None:
        """How many may be proposed at most, if a step brings it so many tokens. None: its prompt is still
        being read, or these are its last, or it has left the running ones.
        """
        left = request.output.limit - len(request.output.token_ids) - new
        if not new or left < 1 or request.state is not State.RUNNING:
            return None
        return min(self.lengths.most, left - 1)

    def _propose(self, requests: Sequence[Request], tokens: Sequence[list[int]]) -> list[list[int]]:
        """[S]: proposals for whoever goes on."""
        drafts: list[list[int]] = [[] for _ in tokens]
        # 1. Who goes on, and how many tokens may come behind the one that the next step gives anyway.
        new = [0 if _ends(r, kept) else len(kept) for r, kept in zip(requests, tokens, strict=True)]
        wanted = self._wanted(requests, new)
        if not any(wanted):  # nobody: the proposer falls behind, and that costs nothing
            return drafts
        # 2. Everybody's next token first: there is room for it, or nothing is proposed. Then for guesses.
        going = [s for s, count in enumerate(new) if count and self.cap(requests[s], count) is not None]
        known = {s: [*requests[s].token_ids, *tokens[s]] for s in going}
        fits = {s: self.scheduler.lend(requests[s], len(known[s])) for s in going}
        self._lent = True
        work: list[tuple[int, Text, int]] = []
        for s in going:
            k = int(min(wanted[s], self.proposer.max_positions - len(known[s])))
            if k > 0 and fits[s] and self.scheduler.lend(requests[s], len(known[s]) + k):
                work.append((s, (requests[s], known[s]), k))
        # 3. Who has not been asked for long is far behind, and catches up by and by.
        late = [max(0, self.proposer.unread(*text) - (self.lengths.most + 1)) for _, text, _ in work]
        work = list(_in_reach(work, late))
        self.lengths.proposing(min(CATCH_UP, sum(late)))
        proposals = self.proposer.propose([text for _, text, _ in work], [k for *_, k in work])
        for (s, (request, _), k), proposal in zip(work, proposals, strict=True):
            drafts[s] = proposal
            if k and not proposal:  # asked for, and there was none: as good as one that did not stand
                self.lengths.observe(request.id, 1, 0)
        return drafts


def drafts_of(batch: Batch) -> Iterator[list[int]]:
    """Of each sequence: the tokens that the step's rows verify."""
    row = 0
    for count in batch.rows.counts:
        yield [batch.token_ids[at + 1] for at in batch.rows.chosen[row : row + max(0, count - 1)]]
        row += count


def _ends(request: Request, tokens: Sequence[int]) -> bool:
    """Whether its output ends with these tokens, by a stop token or because there is none."""
    return any(token_id < 0 or token_id in request.sampling.stop_ids for token_id in tokens)


def _in_reach(work: list[tuple[int, Text, int]], late: list[int]) -> Iterator[tuple[int, Text, int]]:
    """`work`, but of who is `late`, CATCH_UP tokens altogether: a piece of the text, and no proposal."""
    left = CATCH_UP
    for (s, (request, ids), k), behind in zip(work, late, strict=True):
        if behind <= left:
            yield s, (request, ids), k
        elif left:
            yield s, (request, ids[: len(ids) - behind + left]), 0
        left -= min(behind, left)
