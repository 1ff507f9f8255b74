"""Which of the proposed tokens stand: exact rejection sampling, for a whole batch at once. Part 16.

Promises that greedy output is the target's own, and that a sampled token has exactly the target's
distribution, whoever proposed and however badly. Where a request names a seed it is the plain sampler's own
draw: how many drafts come depends on time, and a seed's text must not. What may differ is rounding: a pass
over several rows adds up in another order than a pass over one. Such a draw hardly ever turns on that in fp32
and int8 (engine/quantization/cpu.py says what codes make of it). Does not know where proposals come from.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318.
"""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.decoding.sampling import NO_TOKEN, Draw, adjust, distribution, draw, uniform
from engine.execution.runner import Logits, Select, choose
from engine.requests.batch import Batch
from engine.speculation.config import MOST_TOKENS


class Proposals:
    """What the drafts of sampled requests were drawn from: until they are verified."""

    def __init__(self) -> None:
        self._probs: dict[str, dict[int, Tensor]] = {}  # by sequence and position: [V]

    def put(self, seq_id: str, position: int, probs: Tensor) -> None:
        """The draft of output token `position` was drawn from probs[V]. What lies there, behind it, or far
        before it is of an older proposal.
        """
        older = self._probs.get(seq_id, {}).items()
        before = {place: p for place, p in older if position - MOST_TOKENS < place < position}
        self._probs[seq_id] = before | {position: probs}

    def get(self, seq_id: str, position: int) -> Tensor | None:
        """[V]; None: that draft was not drawn, it was certain."""
        return self._probs.get(seq_id, {}).get(position)

    def retain(self, seq_ids: Container[str]) -> None:
        """Of all others nothing will be verified any more."""
        for seq_id in [seq_id for seq_id in self._probs if seq_id not in seq_ids]:
            del self._probs[seq_id]


class Verified(NamedTuple):
    """One row of logits."""

    draw: Draw
    position: int  # which output token it gives
    draft: int | None  # what is proposed there, to be accepted or not; None: the token is drawn afresh
    proposal: Tensor | None  # [V]: what the draft was drawn from; None: it was certain


class RejectionSampler:
    """A runner's `select`: a sequence with k drafts in the step has k + 1 rows, each of which gets the token
    that stands there if all before it do.
    """

    def __init__(self, proposals: Proposals, plain: Select = choose) -> None:
        """`plain`: who chooses in steps in which nobody has drafts."""
        self.proposals, self.plain = proposals, plain

    def __call__(self, logits: Logits, batch: Batch) -> Tensor:
        """token ids[R]"""
        if not batch.has_drafts:
            return self.plain(logits, batch)
        rows = list(self._rows(batch))
        greedy = all(row.draw.temperature == 0 for row in rows)
        return (_greedy if greedy else _sampled)(logits.values, rows)

    def _rows(self, batch: Batch) -> Iterator[Verified]:
        row = 0
        for name, count in zip(batch.ids, batch.rows.counts, strict=True):
            for i in range(count):
                draw, position = batch.draws.rows[row], batch.draws.positions[row]
                draft = batch.token_ids[batch.rows.chosen[row] + 1] if i < count - 1 else None
                if draw.names_seed:  # drawn afresh, and compared with the draft afterwards
                    draft = None
                drawn = draft is not None and draw.temperature > 0
                proposal = self.proposals.get(name, position) if drawn else None
                yield Verified(draw, position, draft, proposal)
                row += 1


def _sampled(logits: Tensor, rows: Sequence[Verified]) -> Tensor:
    """logits[R, V] -> token ids[R]: each row's draft if that is accepted, else one drawn from what the draft
    leaves over; where there is no draft, one drawn from the target's distribution. NO_TOKEN where the largest
    logit is no finite number. Acceptance takes the `uniform` of the row's seed and position, the draw their
    noise; these are independent.
    """
    draws, positions = [row.draw for row in rows], [row.position for row in rows]
    p = distribution(logits, draws, positions)  # [R, V]
    q = torch.zeros_like(p)  # without a draft: nothing
    for i, row in enumerate(rows):
        if row.proposal is not None:
            q[i] = row.proposal
        elif row.draft is not None:
            q[i, row.draft] = 1.0
    # A draft is accepted with probability min(1, p / q).
    drafts = torch.tensor([-1 if row.draft is None else row.draft for row in rows]).to(p.device)  # [R]
    numbers = [uniform(row.draw.seed, row.position) for row in rows]
    u = torch.tensor(numbers, dtype=torch.float64).to(p.device)  # [R]
    wanted, proposed = (x.gather(-1, drafts.clamp(min=0)[:, None])[:, 0].double() for x in (p, q))  # [R]
    accepted = (drafts >= 0) & (u * proposed < wanted)
    drawn = draw(residual(p, q), [row.draw.seed for row in rows], positions)
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, torch.where(accepted, drafts, drawn), NO_TOKEN)


def _greedy(logits: Tensor, rows: Sequence[Verified]) -> Tensor:
    """logits[R, V] -> token ids[R]"""
    best, token_ids = adjust(logits, [row.draw for row in rows], [row.position for row in rows]).max(-1)
    return torch.where(best.isfinite(), token_ids, NO_TOKEN)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p[R, V], q[R, V] -> [R, V]: what a rejected draft's successor is drawn from, where p is larger than q;
    p itself where nothing is (in exact arithmetic nothing is rejected there). Not normalized.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def standing(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Of the k + 1 tokens of a sequence's rows those that stand: behind the first that is not its draft there
    is nothing.
    """
    for i, draft in enumerate(drafts):
        if tokens[i] != draft:
            return list(tokens[: i + 1])
    return list(tokens)
