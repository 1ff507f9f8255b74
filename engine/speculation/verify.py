"""Which of the proposed tokens stand: exact rejection sampling, for a whole batch at once. Part 16.

Promises that greedy output is the target's own, and that a sampled token has exactly the target's
distribution, whoever proposed and however badly. Where a request names a seed it is the plain sampler's: how
many drafts come depends on time, and a seed's text must not. Does not know where proposals come from.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.decoding.sampling import NO_TOKEN, SamplingState, adjust, distribution, draw, uniform
from engine.executor import sample_batch
from engine.scheduling.request import Request

SKIPPED = -2  # stands for the tokens behind one that was rejected: there are none
ACCEPT = 0x5DEECE66D1CE4E5B  # makes of a request's seed another, whose numbers decide what is accepted
Proposals = Mapping[str, Tensor]  # request id -> [k, V]: what its drafts were drawn from; absent: not drawn


class _Row(NamedTuple):
    """One row of logits."""

    state: SamplingState
    position: int  # which output token it gives
    draft: int | None  # what is proposed there, to be accepted or not; None: the token is drawn afresh
    proposal: Tensor | None  # [V]: what the draft was drawn from; None: it was certain


class Verifier:
    """A sampler for an executor: `proposals` are looked up when a step's logits are there."""

    def __init__(self, proposals: Proposals, plain: Callable[[Tensor, Batch], Tensor] = sample_batch) -> None:
        """`plain`: the sampler of steps in which nobody has drafts."""
        self.proposals, self.plain = proposals, plain

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits[R, V] -> token ids[R]. A sequence with k drafts in the step has k + 1 rows: its accepted
        drafts come first, then one token more, then SKIPPED.
        """
        if not has_drafts(batch):
            return self.plain(logits, batch)
        rows = [row for s in range(len(batch.requests)) for row in self._rows(batch, s)]
        greedy = all(row.state.temperature == 0 for row in rows)
        chosen = (_greedy if greedy else _sampled)(logits, rows)
        # Behind the first token that is not its draft there is nothing.
        tokens = []
        for request, own in zip(batch.requests, batch.logit_rows, strict=True):
            stands = True
            for draft in _drafts(request, len(own)):
                token_id = chosen[len(tokens)]
                tokens.append(token_id if stands else SKIPPED)
                stands = stands and token_id == draft
        return torch.tensor(tokens, dtype=torch.int64)

    def _rows(self, batch: Batch, s: int) -> Iterator[_Row]:
        request, own = batch.requests[s], batch.logit_rows[s]
        proposals, named = self.proposals.get(request.id), names_a_seed(request.sampling)
        for i, (row, draft) in enumerate(zip(own, _drafts(request, len(own)), strict=True)):
            draft = None if named else draft
            drawn = draft is not None and proposals is not None and request.sampling.temperature
            position = batch.positions[row] + 1 - request.num_prompt_tokens
            yield _Row(_after(request, i), position, draft, proposals[i] if drawn else None)


def _sampled(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """Each row's token: its draft if that is accepted, else one drawn from what the draft leaves over; where
    there is no draft, one drawn from the target's distribution. NO_TOKEN where the largest logit is no finite
    number. Acceptance takes the number of `seed ^ ACCEPT` at the row's position, the draw that of `seed`.
    """
    states, positions = [row.state for row in rows], [row.position for row in rows]
    p = distribution(logits, states, positions)  # [R, V]
    q = torch.zeros_like(p)  # without a draft: nothing
    for i, row in enumerate(rows):
        if row.proposal is not None:
            q[i] = row.proposal
        elif row.draft is not None:
            q[i, row.draft] = 1.0
    # A draft is accepted with probability min(1, p / q).
    at = torch.arange(len(rows)), torch.tensor([row.draft or 0 for row in rows])
    shares = zip(p[at].double().tolist(), q[at].double().tolist(), strict=True)
    accepted = [
        row.draft is not None and uniform(row.state.seed ^ ACCEPT, row.position) * proposed < wanted
        for row, (wanted, proposed) in zip(rows, shares, strict=True)
    ]
    drawn = draw(residual(p, q), [state.seed for state in states], positions).tolist()
    finite = logits.amax(-1).isfinite().tolist()
    return [
        NO_TOKEN if not finite[i] else row.draft if accepted[i] else drawn[i] for i, row in enumerate(rows)
    ]


def _greedy(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    best, token_ids = adjust(logits, [row.state for row in rows], [row.position for row in rows]).max(-1)
    return torch.where(best.isfinite(), token_ids, NO_TOKEN).tolist()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p[R, V], q[R, V] -> [R, V]: what a rejected draft's successor is drawn from, where p is larger than q;
    p itself where nothing is (in exact arithmetic nothing is rejected there). Not normalized.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def has_drafts(batch: Batch) -> bool:
    """Whether there is anything to verify in the step."""
    return any(request.draft_ids for request in batch.requests)


def names_a_seed(state: SamplingState) -> bool:
    """Whether tokens are drawn, and by a seed of the request's own choice."""
    return state.temperature > 0 and state.params.seed is not None


def _drafts(request: Request, rows: int) -> list[int | None]:
    """[rows]: what is proposed at each; None where nothing is."""
    drafts = request.draft_ids[: max(0, rows - 1)]
    return [*drafts, *[None] * (rows - len(drafts))]


def _after(request: Request, i: int) -> SamplingState:
    """The request's state behind its first `i` drafts: penalties count them as output."""
    state = request.sampling
    return state.behind(request.draft_ids[:i]) if i and state.is_adjusted else state
