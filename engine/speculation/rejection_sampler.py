"""Which drafts are accepted: exact rejection sampling, for a whole batch at once. Part 16.

Promises that greedy output is the target's own, and that a sampled token has exactly the target's
distribution, whatever the drafts are. A request that names a seed gets the tokens that the plain sampler
would draw: how many drafts it has depends on times, and a seed's text must not. What may differ is rounding:
a pass over several rows adds up in another order than a pass over one, which hardly ever decides a draw in
fp32 and int8 (engine/quantization/cpu.py says what codes make of it). Does not know where drafts come from.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.decoding.sampling import NO_TOKEN, Draw, adjust, distribution, draw, uniform
from engine.execution.runner import Logits, Select, choose
from engine.requests.batch import Batch
from engine.speculation.config import MAX_DRAFTS


class DraftProbs:
    """The distributions that drafts were drawn from, until the drafts are verified."""

    def __init__(self) -> None:
        self._probs: dict[str, dict[int, Tensor]] = {}  # by sequence and position: [V]

    def put(self, seq_id: str, position: int, probs: Tensor) -> None:
        """The draft of output token `position` was drawn from probs[V]. Entries at this position, behind
        it, or more than MAX_DRAFTS before it are of an older proposal, and removed.
        """
        older = self._probs.get(seq_id, {}).items()
        before = {i: probs for i, probs in older if position - MAX_DRAFTS < i < position}
        self._probs[seq_id] = before | {position: probs}

    def get(self, seq_id: str, position: int) -> Tensor | None:
        """[V]; None: the draft was not drawn from a distribution, it was certain."""
        return self._probs.get(seq_id, {}).get(position)

    def retain(self, seq_ids: Collection[str]) -> None:
        """Remove the entries of all sequences but these."""
        if self._probs:
            retained = set(seq_ids)
            self._probs = {seq_id: probs for seq_id, probs in self._probs.items() if seq_id in retained}


class VerifiedRow(NamedTuple):
    """One row of logits, and the draft of the token that it gives."""

    draw: Draw
    position: int  # which output token it gives
    draft: int | None  # to be accepted or not; None: the token is drawn without one
    draft_probs: Tensor | None  # [V]: what the draft was drawn from; None: it was certain


class RejectionSampler:
    """A runner's `select`: a sequence with k drafts in the step has k + 1 rows, each of which gets the token
    that comes there if all drafts before it are accepted.
    """

    def __init__(self, draft_probs: DraftProbs, plain: Select = choose) -> None:
        """`plain`: the `select` of steps without drafts."""
        self.draft_probs, self.plain = draft_probs, plain

    def __call__(self, logits: Logits, batch: Batch) -> Tensor:
        """token ids[R]"""
        # A sequence with drafts is in the next step or loses them. This step's stay: if it fails, it may be
        # verified again.
        self.draft_probs.retain(batch.ids)
        if not batch.has_drafts:
            return self.plain(logits, batch)
        rows = list(self._rows(batch))
        greedy = all(row.draw.temperature == 0 for row in rows)
        return (_greedy if greedy else _sampled)(logits.values, rows)

    def _rows(self, batch: Batch) -> Iterator[VerifiedRow]:
        """The R rows. In one with a draft, the draft is the next of the step's tokens."""
        row = 0
        for seq_id, count in zip(batch.ids, batch.rows.counts, strict=True):
            for i in range(count):
                draw, position = batch.draws.rows[row], batch.draws.positions[row]
                draft = batch.token_ids[batch.rows.chosen[row] + 1] if i < count - 1 else None
                if draw.names_seed:  # drawn without the draft, and compared with it afterwards
                    draft = None
                is_drawn = draft is not None and draw.temperature > 0
                draft_probs = self.draft_probs.get(seq_id, position) if is_drawn else None
                yield VerifiedRow(draw, position, draft, draft_probs)
                row += 1


def _sampled(logits: Tensor, rows: Sequence[VerifiedRow]) -> Tensor:
    """logits[R, V] -> token ids[R]: each row's draft if that is accepted, else a token drawn from
    `residual`; a row without a draft is drawn from the target's distribution. NO_TOKEN where the largest
    logit is no finite number. Acceptance takes the `uniform` of the row's seed and position, the draw their
    noise; these are independent.
    """
    draws, positions = [row.draw for row in rows], [row.position for row in rows]
    p = distribution(logits, draws, positions)  # [R, V]
    q = torch.zeros_like(p)  # without a draft: nothing
    for i, row in enumerate(rows):
        if row.draft_probs is not None:
            q[i] = row.draft_probs
        elif row.draft is not None:
            q[i, row.draft] = 1.0
    # A draft is accepted with probability min(1, p / q). A row without one has -1, and accepts nothing.
    drafts = torch.tensor([-1 if row.draft is None else row.draft for row in rows]).to(p.device)  # [R]
    numbers = [uniform(row.draw.seed, row.position) for row in rows]
    u = torch.tensor(numbers, dtype=torch.float64).to(p.device)  # [R]
    p_draft, q_draft = (x.gather(-1, drafts.clamp(min=0)[:, None])[:, 0].double() for x in (p, q))  # [R]
    accepted = (drafts >= 0) & (u * q_draft < p_draft)
    drawn = draw(residual(p, q), [row.draw.seed for row in rows], positions)
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, torch.where(accepted, drafts, drawn), NO_TOKEN)


def _greedy(logits: Tensor, rows: Sequence[VerifiedRow]) -> Tensor:
    """logits[R, V] -> token ids[R]"""
    largest, token_ids = adjust(logits, [row.draw for row in rows], [row.position for row in rows]).max(-1)
    return torch.where(largest.isfinite(), token_ids, NO_TOKEN)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p[R, V], q[R, V] -> [R, V]: what the token in place of a rejected draft is drawn from: p - q, where
    that is positive; p itself if it is so nowhere (in exact arithmetic no draft is rejected then). Not
    normalized.
    """
    difference = (p - q).clamp(min=0)
    return torch.where(difference.sum(-1, keepdim=True) > 0, difference, p)


def confirmed_tokens(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Of the k + 1 tokens of a sequence's rows, those up to the first that is not its draft."""
    for i, draft in enumerate(drafts):
        if tokens[i] != draft:
            return list(tokens[: i + 1])
    return list(tokens)
