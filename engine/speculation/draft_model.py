"""Drafts from a small model that reads the same sequences as the target model. Part 16.

The draft model has a memory of its own, and uses the target's block tables: its keys and values lie in the
same blocks there as the target's lie in the target's memory. So the plan shares, forks and swaps blocks for
both models at once.

A call runs one or more passes of the draft model, each for all sequences at once. No token is computed twice,
and a guess that is confirmed is not computed again. The reported distributions are those from which the
drafts were drawn. Passes follow one another without a wait for the host, which fetches all guesses at the
end. This module knows nothing of the target model.
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
from engine.speculation.rejection_sampler import DraftProbs

DRAFT_SEED = 0x2545F4914F6CDD1D  # arbitrary bits, XORed to a seed: drafts then take other random numbers


class DraftSampler:
    """The `select` of a draft model: notes the distributions from which sampled drafts were drawn."""

    def __init__(self, draft_probs: DraftProbs) -> None:
        self.draft_probs = draft_probs

    def __call__(self, logits: Logits, batch: Batch) -> Tensor:
        """Choose token ids[R]. No distribution is noted for a likeliest token, nor for a token that is drawn
        by a seed that the request names: the target takes such a draft as certain.
        """
        draws = batch.draws
        if not any(row.temperature for row in draws.rows):
            return choose(logits, batch)
        probs = distribution(logits.values, draws.rows, draws.positions)  # [R, V]
        seq_ids = [seq_id for seq_id, count in zip(batch.ids, batch.rows.counts, strict=True) if count]  # [R]
        for seq_id, row, position, p in zip(seq_ids, draws.rows, draws.positions, probs, strict=True):
            if row.temperature and not row.names_seed:
                self.draft_probs.put(seq_id, position, p)
        return draw(probs, [row.seed for row in draws.rows], draws.positions)


class _SequencePass(NamedTuple):
    """One sequence in a pass of the draft model."""

    request: Request
    ids: list[int]  # all known tokens of the sequence
    start: int  # the position of the first token of `new`
    new: list[int]  # tokens to compute in this pass
    guesses: list[int] | None  # the sequence's guesses so far; None if this pass chooses no token


class DraftModel:
    """A `Proposer` that computes the confirmed tokens with the draft model, and continues them."""

    def __init__(self, runner: Executor, cache: KVCacheManager, max_positions: int) -> None:
        """`runner` is the draft model's, with a `DraftSampler` and `LastTokens`. `cache` is the target's
        plan. `max_positions` is the length of the longest text, in tokens.
        """
        self.runner, self.cache, self.max_positions = runner, cache, max_positions

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many of the known tokens `ids` must be computed before a draft: at least the last token, for
        its logits. Confirmed guesses are computed already.
        """
        progress = self.cache.draft_progress[request.id]
        computed = progress.num_tokens
        for guess, token_id in zip(progress.guesses, ids[computed:], strict=False):
            if guess != token_id:
                break
            computed += 1
        return max(1, len(ids) - computed)

    def propose(
        self, texts: Sequence[tuple[Request, list[int]]], max_tokens: Sequence[int]
    ) -> list[list[int]]:
        """texts[n], max_tokens[n] -> drafts[n]: for each text, at most max_tokens[i] guessed tokens.

        A text is (request, its known tokens). With max_tokens[i] = 0 the draft model only computes the tokens
        of the text that it has not computed yet, and drafts[i] is empty.
        """
        drafts: list[list[int]] = [[] for _ in texts]
        # 1. Compute the unread tokens of all texts. They overwrite the keys and values of rejected guesses.
        starts = [len(ids) - self.unread(request, ids) for request, ids in texts]
        unread = [ids[start:] for (_, ids), start in zip(texts, starts, strict=True)]
        computing = list(range(len(texts)))  # the indices of texts in the next pass
        passes: list[tuple[list[int], Pending]] = []  # texts with a guess on the device, and its pass
        while computing:
            drafting = [s for s in computing if max_tokens[s] > len(drafts[s])]  # those that get a guess
            work = [
                _SequencePass(*texts[s], starts[s], unread[s], drafts[s] if s in drafting else None)
                for s in computing
            ]
            pending = self.runner.submit(self._batch(work))
            for s in computing:
                self._note_progress(*texts[s], drafts[s])
            # 2. Each text of `drafting` has one more guess, which is computed only if another will follow.
            #    Read the guesses now if penalties must count them on the host, otherwise at the end.
            if any(texts[s][0].sampling.is_adjusted for s in drafting):
                guesses = _chosen(pending)
            else:
                guesses = [PLACEHOLDER] * len(drafting)
                passes.append((drafting, pending))
            for s, guess in zip(drafting, guesses, strict=True):
                starts[s] += len(unread[s])
                drafts[s].append(guess)
                unread[s] = [guess]
            computing = [s for s in drafting if max_tokens[s] > len(drafts[s])]
        # 3. Read the guesses. All but the last of each sequence are computed.
        for drafting, pending in passes:
            for s, guess in zip(drafting, _chosen(pending), strict=True):
                drafts[s][drafts[s].index(PLACEHOLDER)] = guess
        for (request, ids), guesses in zip(texts, drafts, strict=True):
            self._note_progress(request, ids, guesses[:-1])
        return drafts

    def _note_progress(self, request: Request, ids: list[int], guesses: list[int]) -> None:
        """Note that the known tokens `ids`, and the guesses behind them, are computed."""
        progress = self.cache.draft_progress[request.id]
        progress.num_tokens, progress.guesses = len(ids), list(guesses)

    def _batch(self, work: Sequence[_SequencePass]) -> Batch:
        """The record of a pass over the sequences of `work`."""
        query_start = (0, *accumulate(len(sequence.new) for sequence in work))
        ends = tuple(sequence.start + len(sequence.new) for sequence in work)
        ids = tuple(sequence.request.id for sequence in work)
        positions: list[int] = []  # [T]
        for sequence, end in zip(work, ends, strict=True):
            positions += range(sequence.start, end)
        tables, slots = self.cache.locate(ids, query_start, positions)
        counts = tuple(int(sequence.guesses is not None) for sequence in work)
        choosing = [s for s, count in enumerate(counts) if count]
        return Batch(
            ids=ids,
            token_ids=tuple(token_id for sequence in work for token_id in sequence.new),
            positions=tuple(positions),
            query_start=query_start,
            context_lens=ends,
            tables=tables,
            slots=slots,
            copies=(),  # the target's step has them; a hook makes them in this model's memory, too
            rows=Rows(tuple(query_start[s + 1] - 1 for s in choosing), counts),
            draws=Draws(
                tuple(_draw_of(work[s]) for s in choosing),
                tuple(ends[s] - work[s].request.num_prompt_tokens for s in choosing),
            ),
            adapters=(NO_ADAPTER,) * len(work),
        )


def _draw_of(sequence: _SequencePass) -> Draw:
    """How the sequence's guess is drawn: by the target's parameters. If the request names a seed, the guess
    takes the target's random number, too, so that guess and target often agree. Otherwise it takes another
    number, since rejection sampling is exact only if the target's draw does not depend on the guess.

    Penalties also count the tokens of the last step, which are not in the output yet, and the guesses.
    """
    request, state = sequence.request, sequence.request.sampling
    if state.is_adjusted:
        num_counted = request.num_prompt_tokens + len(state.output_ids)
        state = state.behind([*sequence.ids[num_counted:], *(sequence.guesses or ())])
    row = state.draw()
    return row if row.names_seed else replace(row, seed=row.seed ^ DRAFT_SEED)


def _chosen(pending: Pending) -> list[int]:
    """The guesses of a pass, in the order of its sequences. Where no token could be chosen, the guess is 0: a
    draft must be a token, and the target decides about it.
    """
    return [max(0, token_id) for tokens in pending.result().tokens for token_id in tokens]
