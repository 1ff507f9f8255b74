"""Drafts from a small model that reads the same sequences as the target model. Part 16.

The draft model has a memory of its own, and uses the target's block tables: its keys and values lie in the
same blocks there as the target's lie in the target's memory. So the plan shares, forks and swaps blocks for
both models at once.

A call runs one or more passes of the draft model, each for all sequences that need it at once. A token is
computed once, confirmed drafts among them, unless a call fails. Only the last known token may be computed a
second time, since its logits are needed for the first draft. The reported distributions are those from which
the drafts were drawn. Passes follow one another without a wait for the host, which fetches the drafts at the
end, unless penalties count them. This module knows nothing of the target model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from engine.cache.manager import KVCacheManager
from engine.decoding.sampling import distribution, draw
from engine.decoding.sampling_state import Draw
from engine.execution.runner import Executor, Logits, choose
from engine.requests.batch import NO_ADAPTER, PLACEHOLDER, Batch, Draws, Rows
from engine.requests.request import Request
from engine.requests.step import Pending
from engine.speculation.capability import ProposerInput
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
        seq_ids = [id for id, count in zip(batch.ids, batch.rows.chosen_counts, strict=True) if count]  # [R]
        row_probs = probs.unbind()  # [V] for each of R rows
        for r, row in enumerate(draws.rows):
            if row.temperature and not row.names_seed:
                self.draft_probs.put(seq_ids[r], draws.positions[r], row_probs[r])
        return draw(probs, [row.seed for row in draws.rows], draws.positions)


@dataclass(slots=True)
class _Sequence:
    """One sequence during a call of `DraftModel.propose`."""

    request: Request
    ids: list[int]  # all known tokens of the sequence
    max_drafts: int
    start: int  # the position of the first token of `new`
    new: list[int]  # the tokens that the next pass computes
    drafts: list[int] = field(default_factory=list)  # PLACEHOLDER for one that is still on the device

    @property
    def lacks_draft(self) -> bool:
        """Whether the next pass chooses a draft for the sequence."""
        return len(self.drafts) < self.max_drafts

    def add(self, draft: int) -> None:
        """Note a draft that a pass has chosen. The next pass computes it, if another one is to follow."""
        self.start += len(self.new)
        self.drafts.append(draft)
        self.new = [draft]


class _UnreadPass(NamedTuple):
    """A pass whose drafts are still on the device."""

    number: int  # from 0: the pass chooses draft number `number` of each sequence in `drafting`
    drafting: list[_Sequence]  # those that get a draft, in the order of the pass
    pending: Pending


class DraftModel:
    """A `Proposer` that computes the confirmed tokens with the draft model, and continues them."""

    def __init__(self, runner: Executor, cache: KVCacheManager, max_positions: int) -> None:
        """`runner` is the draft model's, with a `DraftSampler` and `LastTokens`. `cache` is the target's
        plan. `max_positions` is the length of the longest text, in tokens.
        """
        self.runner, self.cache, self.max_positions = runner, cache, max_positions

    def num_unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many of the known tokens `ids` must be computed before a draft: at least the last token, for
        its logits. Confirmed drafts are computed already.
        """
        progress = self.cache.draft_progress[request.id]
        num_computed = progress.num_tokens
        for draft, token_id in zip(progress.drafts, ids[num_computed:], strict=False):
            if draft != token_id:
                break
            num_computed += 1
        return max(1, len(ids) - num_computed)

    def propose(self, inputs: Sequence[ProposerInput]) -> list[list[int]]:
        """inputs[n] -> drafts[n]: for each text, at most `max_tokens` tokens that may follow. With 0, the
        draft model only computes the tokens of the text that it has not computed yet.
        """
        sequences: list[_Sequence] = []
        for request, ids, max_tokens in inputs:
            start = len(ids) - self.num_unread(request, ids)
            progress = self.cache.draft_progress[request.id]
            # Forget the drafts from `start` on: the passes write over their keys and values.
            del progress.drafts[max(0, start - progress.num_tokens) :]
            sequences.append(_Sequence(request, ids, max_drafts=max_tokens, start=start, new=ids[start:]))
        # 1. The first pass computes the unread tokens of all texts, over the keys and values of rejected
        #    drafts. Each further pass computes the last drafts of those texts that lack another one.
        computing = sequences
        num_passes = 0
        unread_passes: list[_UnreadPass] = []
        while computing:
            drafting = [sequence for sequence in computing if sequence.lacks_draft]
            pending = self.runner.submit(self._batch(computing))
            # 2. Read the drafts now if the host counts them for the next draws, and otherwise at the end.
            if any(sequence.request.sampling.is_adjusted for sequence in drafting):
                drafts = _chosen(pending)
            else:
                drafts = [PLACEHOLDER] * len(drafting)
                unread_passes.append(_UnreadPass(num_passes, drafting, pending))
            for sequence, draft in zip(drafting, drafts, strict=True):
                sequence.add(draft)
            computing = [sequence for sequence in drafting if sequence.lacks_draft]
            num_passes += 1
        # 3. Read the drafts.
        for unread in unread_passes:
            for sequence, draft in zip(unread.drafting, _chosen(unread.pending), strict=True):
                sequence.drafts[unread.number] = draft
        # 4. Note what is computed: the `ids` of each sequence, and its drafts but for the last. Only now:
        #    if a pass fails, the step is rolled back, and other tokens may take the places of its own.
        for sequence in sequences:
            progress = self.cache.draft_progress[sequence.request.id]
            progress.num_tokens, progress.drafts = len(sequence.ids), sequence.drafts[:-1]
        return [sequence.drafts for sequence in sequences]

    def _batch(self, sequences: Sequence[_Sequence]) -> Batch:
        """The record of a pass that computes the `new` tokens of the sequences."""
        # 1. The new tokens, and where their keys and values lie.
        query_start = (0, *accumulate(len(sequence.new) for sequence in sequences))
        ends = tuple(sequence.start + len(sequence.new) for sequence in sequences)
        ids = tuple(sequence.request.id for sequence in sequences)
        token_ids: list[int] = []  # [T]
        positions: list[int] = []  # [T]
        for sequence, end in zip(sequences, ends, strict=True):
            token_ids += sequence.new
            positions += range(sequence.start, end)
        tables, slots = self.cache.locate(ids, query_start, positions)
        # 2. A row for each sequence that gets a draft: at its last new token.
        counts = tuple(1 if sequence.lacks_draft else 0 for sequence in sequences)
        drafting = [s for s, sequence in enumerate(sequences) if sequence.lacks_draft]
        rows = tuple(query_start[s + 1] - 1 for s in drafting)
        draws = tuple(_draw_of(sequences[s]) for s in drafting)
        draw_positions = tuple(ends[s] - sequences[s].request.num_prompt_tokens for s in drafting)
        return Batch(
            ids=ids,
            token_ids=tuple(token_ids),
            positions=tuple(positions),
            query_start=query_start,
            context_lens=ends,
            tables=tables,
            slots=slots,
            copies=(),  # the target's step has them; a hook makes them in this model's memory, too
            rows=Rows(chosen=rows, chosen_counts=counts),
            draws=Draws(draws, draw_positions),
            adapters=(NO_ADAPTER,) * len(sequences),
        )


def _draw_of(sequence: _Sequence) -> Draw:
    """How the sequence's next draft is drawn: by the target's parameters. If the request names a seed, the
    draft takes the target's random number, too, so that draft and target often agree. Otherwise it takes
    another number: rejection sampling is exact only if the target's draw does not depend on the draft.

    Penalties also count the tokens of the last step, which are not in the output yet, and the drafts so far.
    """
    request, state = sequence.request, sequence.request.sampling
    if state.is_adjusted:
        num_counted = request.num_prompt_tokens + len(state.output_ids)
        state = state.with_drafts([*sequence.ids[num_counted:], *sequence.drafts])
    row = state.draw()
    return row if row.names_seed else replace(row, seed=row.seed ^ DRAFT_SEED)


def _chosen(pending: Pending) -> list[int]:
    """The drafts of a pass, in the order of its sequences. Where no token could be chosen, the draft is 0: a
    draft must be a token, and the target decides about it.
    """
    drafts: list[int] = []
    for tokens in pending.result().tokens:
        drafts += [max(0, token_id) for token_id in tokens]
    return drafts
