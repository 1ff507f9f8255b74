"""Accepts or rejects drafts by exact rejection sampling, for a whole batch at once. Part 16.

Greedy output is the target's own, and a sampled token has exactly the target's distribution, whatever the
drafts are. A request that names a seed gets the tokens that the plain sampler would draw: the number of its
drafts depends on times, and the text of a seed must not. Only rounding may differ: a pass over several rows
adds up numbers in another order than a pass over one row. In fp32 and int8, this hardly ever decides a draw
(engine/quantization/cpu.py has more on int8). This module does not know where drafts come from.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.decoding.noise import uniform
from engine.decoding.sampling import NO_TOKEN, adjust, distribution, draw
from engine.decoding.sampling_state import Draw
from engine.execution.runner import Logits, Select, choose
from engine.requests.batch import Batch
from engine.speculation.config import MAX_DRAFTS


class DraftProbs:
    """The distributions that drafts were drawn from, until the drafts are verified."""

    def __init__(self) -> None:
        self._probs: dict[str, dict[int, Tensor]] = {}  # by sequence and position: [V]

    def put(self, seq_id: str, position: int, probs: Tensor) -> None:
        """Note that the draft of output token `position` was drawn from probs[V]. Entries at this position,
        at later ones, or MAX_DRAFTS or more positions before belong to older proposals, and are removed.
        """
        kept: dict[int, Tensor] = {}  # the earlier drafts of the same proposal
        for other_position, other_probs in self._probs.get(seq_id, {}).items():
            if position - MAX_DRAFTS < other_position < position:
                kept[other_position] = other_probs
        self._probs[seq_id] = kept | {position: probs}

    def get(self, seq_id: str, position: int) -> Tensor | None:
        """The distribution [V] from which a draft was drawn; None if the draft was certain."""
        return self._probs.get(seq_id, {}).get(position)

    def retain(self, seq_ids: Collection[str]) -> None:
        """Remove the entries of all sequences except `seq_ids`."""
        if self._probs:
            retained = set(seq_ids)
            self._probs = {seq_id: probs for seq_id, probs in self._probs.items() if seq_id in retained}


class VerifiedRow(NamedTuple):
    """One row of logits, and the draft for the token that is chosen from this row."""

    draw: Draw
    position: int  # the index of the chosen token in the request's output
    draft: int | None  # the draft to accept or reject; None if the token is drawn without a draft
    draft_probs: Tensor | None  # [V]: the distribution of the draft; None if the draft was certain


class RejectionSampler:
    """The `select` of a runner that verifies drafts. A sequence with k drafts in the step has k + 1 rows.
    Each row gets the token that follows if all drafts up to this row are accepted.
    """

    def __init__(self, draft_probs: DraftProbs, plain: Select = choose) -> None:
        """`draft_probs`: the drafts' distributions. `plain`: the `select` of steps without drafts."""
        self.draft_probs, self.plain = draft_probs, plain

    def __call__(self, logits: Logits, batch: Batch) -> Tensor:
        """Choose token ids[R]: a draft, another token, or NO_TOKEN."""
        # A sequence that is not in the step after its proposal loses its drafts, so other entries can go. The
        # entries of this step stay, since a failed step's drafts may be verified again.
        self.draft_probs.retain(batch.ids)
        if not batch.has_drafts:
            return self.plain(logits, batch)
        rows = list(self._rows(batch))
        if all(row.draw.temperature == 0 for row in rows):
            return _greedy(logits.values, rows)
        return _sampled(logits.values, rows)

    def _rows(self, batch: Batch) -> Iterator[VerifiedRow]:
        """The R rows. A row's draft is the step's token that follows the row's own token."""
        r = 0  # the index of the row
        for seq_id, count in zip(batch.ids, batch.rows.chosen_counts, strict=True):
            for i in range(count):
                row_draw, position = batch.draws.rows[r], batch.draws.positions[r]
                draft: int | None = None
                draft_probs: Tensor | None = None
                # No draft follows the last row. With a seed of the request, the token is drawn without regard
                # to the draft, and `confirmed_tokens` compares the two afterwards.
                if i < count - 1 and not row_draw.names_seed:
                    draft = batch.token_ids[batch.rows.chosen[r] + 1]
                    if row_draw.temperature > 0:
                        draft_probs = self.draft_probs.get(seq_id, position)
                yield VerifiedRow(row_draw, position, draft, draft_probs)
                r += 1


def _sampled(logits: Tensor, rows: Sequence[VerifiedRow]) -> Tensor:
    """logits[R, V] -> token ids[R].

    A row with a draft gives the draft if it is accepted, otherwise a token that is drawn from `residual`. A
    row without a draft gives a token that is drawn from the target's distribution. A row whose largest
    adjusted logit is not finite gives NO_TOKEN, also if every token is forbidden: its `distribution` is NaN.
    A row's seed and position give two independent random values: acceptance takes their `uniform`, and the
    draw takes their noise.
    """
    draws, positions = [row.draw for row in rows], [row.position for row in rows]
    p = distribution(logits, draws, positions)  # [R, V]
    q = torch.zeros_like(p)  # stays 0 in rows without a draft, so the residual there is p
    for i, row in enumerate(rows):
        if row.draft_probs is not None:
            q[i] = row.draft_probs
        elif row.draft is not None:
            q[i, row.draft] = 1.0
    # A draft is accepted with probability min(1, p / q). A row without a draft has -1, and accepts none.
    drafts = torch.tensor([-1 if row.draft is None else row.draft for row in rows]).to(p.device)  # [R]
    index = drafts.clamp(min=0)[:, None]  # [R, 1]
    p_draft = p.gather(-1, index)[:, 0].double()  # [R]
    q_draft = q.gather(-1, index)[:, 0].double()  # [R]
    numbers = [uniform(row.draw.seed, row.position) for row in rows]
    u = torch.tensor(numbers, dtype=torch.float64).to(p.device)  # [R]
    accepted = (drafts >= 0) & (u * q_draft < p_draft)
    # The token in place of a rejected draft, and of a row without a draft.
    drawn = draw(residual(p, q), [row.draw.seed for row in rows], positions)
    is_finite = p[:, 0].isfinite()  # [R]; a row is finite, or NaN as a whole
    return torch.where(is_finite, torch.where(accepted, drafts, drawn), NO_TOKEN)


def _greedy(logits: Tensor, rows: Sequence[VerifiedRow]) -> Tensor:
    """logits[R, V] -> token ids[R]: each row's likeliest token, or NO_TOKEN if its adjusted logit is not
    finite.
    """
    draws, positions = [row.draw for row in rows], [row.position for row in rows]
    largest, token_ids = adjust(logits, draws, positions).max(-1)
    return torch.where(largest.isfinite(), token_ids, NO_TOKEN)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p[R, V], q[R, V] -> [R, V]: the distribution of the token in place of a rejected draft, not normalized.
    A row is p - q where positive, and 0 elsewhere. If p - q is positive nowhere, the row is p; in exact
    arithmetic, no draft is rejected then.
    """
    difference = (p - q).clamp(min=0)
    return torch.where(difference.sum(-1, keepdim=True) > 0, difference, p)


def confirmed_tokens(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The first of the k + 1 `tokens` of a sequence's rows, up to and including the first that differs from
    its draft in `drafts`[k].
    """
    for i, draft in enumerate(drafts):
        if tokens[i] != draft:
            return list(tokens[: i + 1])
    return list(tokens)
