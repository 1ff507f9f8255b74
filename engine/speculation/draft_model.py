"""Proposals from a small model that reads along. Part 16.

Its keys and values are more layers over the target's block tables: wherever the target's lie, the draft's do,
in a memory of its own. So whatever the plan shares, forks, or swaps, is shared, forked and swapped for both.

Promises one or more passes of the draft model per call, each for all sequences together; that it reads no
token twice, its own guesses included, if they stood; and that what it says it drew a token from is what it
drew it from. Passes follow one another without the host, which reads all guesses at the end. Knows nothing of
the target.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from engine.cache.manager import KVCacheManager
from engine.decoding.sampling import Draw, distribution, draw
from engine.execution.runner import Executor, Logits, choose
from engine.requests.batch import NO_ADAPTER, PLACEHOLDER, Batch, Draws, Rows
from engine.requests.request import Request
from engine.requests.step import Pending
from engine.speculation.rejection_sampler import Proposals

PROPOSE = 0x2545F4914F6CDD1D  # makes of a request's seed another, whose numbers choose the proposals


class DraftSampler:
    """A draft model's `select`: it remembers what sampled proposals were drawn from."""

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals

    def __call__(self, logits: Logits, batch: Batch) -> Tensor:
        """token ids[R]. The likeliest is certain; so is, for the target, what a named seed gives."""
        draws = batch.draws
        if not any(row.temperature for row in draws.rows):
            return choose(logits, batch)
        probs = distribution(logits.values, draws.rows, draws.positions)  # [R, V]
        drawing = [name for name, count in zip(batch.ids, batch.rows.counts, strict=True) if count]
        for name, row, position, p in zip(drawing, draws.rows, draws.positions, probs, strict=True):
            if row.temperature and not row.names_seed:
                self.proposals.put(name, position, p)
        return draw(probs, [row.seed for row in draws.rows], draws.positions)


class _Reading(NamedTuple):
    """A sequence's part of a pass."""

    request: Request
    ids: list[int]  # its tokens that are known
    start: int  # where the new ones of this pass begin
    new: list[int]
    guesses: list[int] | None  # so far; None: what follows is not wanted


class DraftModel:
    """Reads what the target has confirmed, and goes on from there."""

    def __init__(
        self, runner: Executor, cache: KVCacheManager, proposals: Proposals, max_positions: int
    ) -> None:
        """`runner`: the draft model's, with a `DraftSampler` and `LastTokens`. `cache`: the target's plan."""
        self.runner, self.cache, self.proposals, self.max_positions = runner, cache, proposals, max_positions

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many of its tokens a proposal has to read first: at least the last one, for what comes behind
        it. A guess that stood is read already.
        """
        drafted = self.cache.draft_progress[request.id]
        read = drafted.num_tokens
        for guess, token_id in zip(drafted.guesses, ids[read:], strict=False):
            if guess != token_id:
                break
            read += 1
        return max(1, len(ids) - read)

    def propose(self, texts: Sequence[tuple[Request, list[int]]], most: Sequence[int]) -> list[list[int]]:
        """For each (request, its tokens), at most so many tokens: with 0 they are only read."""
        self.proposals.retain(self.cache.draft_progress)
        drafts: list[list[int]] = [[] for _ in texts]
        # 1. What it has not read yet, of everybody. Keys of guesses that did not stand are written over.
        starts = [len(ids) - self.unread(request, ids) for request, ids in texts]
        new = [ids[start:] for (_, ids), start in zip(texts, starts, strict=True)]
        reading = list(range(len(texts)))
        passes: list[tuple[list[int], Pending]] = []  # whose guesses are still on the device, and these
        while reading:
            going = [s for s in reading if most[s] > len(drafts[s])]
            pending = self.runner.submit(
                self._batch(
                    [
                        _Reading(*texts[s], starts[s], new[s], drafts[s] if s in going else None)
                        for s in reading
                    ]
                )
            )
            for s in reading:
                self._has_read(*texts[s], drafts[s])
            # 2. A token more for each that may have one. It is read only if another is to follow. Penalties
            #    count guesses on the host.
            if any(texts[s][0].sampling.is_adjusted for s in going):
                guesses = _chosen(pending)
            else:
                guesses = [PLACEHOLDER] * len(going)
                passes.append((going, pending))
            for s, guess in zip(going, guesses, strict=True):
                starts[s] += len(new[s])
                drafts[s].append(guess)
                new[s] = [guess]
            reading = [s for s in going if most[s] > len(drafts[s])]
        # 3. What the guesses are, and which of them it has read: all but the last.
        for going, pending in passes:
            for s, guess in zip(going, _chosen(pending), strict=True):
                drafts[s][drafts[s].index(PLACEHOLDER)] = guess
        for (request, ids), guesses in zip(texts, drafts, strict=True):
            self._has_read(request, ids, guesses[:-1])
        return drafts

    def _has_read(self, request: Request, ids: list[int], guesses: list[int]) -> None:
        drafted = self.cache.draft_progress[request.id]
        drafted.num_tokens, drafted.guesses = len(ids), list(guesses)

    def _batch(self, work: Sequence[_Reading]) -> Batch:
        """The record of a pass."""
        query_start = (0, *accumulate(len(part.new) for part in work))
        ids = tuple(part.request.id for part in work)
        positions = tuple(
            position for part in work for position in range(part.start, part.start + len(part.new))
        )
        tables, slots = self.cache.locate(ids, query_start, positions)
        wanted = [part.guesses is not None for part in work]
        chosen = [end - 1 for end, chooses in zip(query_start[1:], wanted, strict=True) if chooses]
        choosing = [part for part in work if part.guesses is not None]
        return Batch(
            ids,
            tuple(token_id for part in work for token_id in part.new),
            positions,
            query_start,
            tuple(part.start + len(part.new) for part in work),
            tables,
            slots,
            (),
            Rows(tuple(chosen), tuple(map(int, wanted))),
            Draws(
                tuple(map(_draw_of, choosing)),
                tuple(part.start + len(part.new) - part.request.num_prompt_tokens for part in choosing),
            ),
            (NO_ADAPTER,) * len(work),
        )


def _draw_of(part: _Reading) -> Draw:
    """By the same parameters as the target's. Who names a seed gets the target's own number: so they often
    agree. What came in the last step is no output yet, and counts for penalties, as guesses do.
    """
    request, state = part.request, part.request.sampling
    if state.is_adjusted:
        said = request.num_prompt_tokens + len(state.output_ids)
        state = state.behind([*part.ids[said:], *(part.guesses or ())])
    row = state.draw()
    return row if row.names_seed else replace(row, seed=row.seed ^ PROPOSE)


def _chosen(pending: Pending) -> list[int]:
    """The guesses of a pass, of those that choose; 0 where there was no token to be had."""
    return [max(0, token_id) for tokens in pending.result().tokens for token_id in tokens]
