"""Which of the proposed tokens stand: exact rejection sampling, for a whole batch at once. Part 16.

Promises that greedy output is the target's own, and that a sampled token has exactly the target's
distribution, whoever proposed and however badly. Does not know where proposals come from.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.decoding.sampling import NO_TOKEN, SamplingState, adjust, distribution, draw, uniform
from engine.scheduling.request import Request

SKIPPED = -2  # stands for the tokens behind one that was rejected: there are none
ACCEPT = 0x5DEECE66D1CE4E5B  # makes of a request's seed another, whose numbers decide what is accepted
Proposals = Mapping[str, Tensor]  # request id -> [k, V]: what its drafts were drawn from; none: from nothing


class Verifier:
    """A sampler for an executor: `proposals` are looked up when a step's logits are there."""

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits[R, V] -> token ids[R]. A sequence with k drafts in the step has k + 1 rows: its accepted
        drafts come first, then one token more, then SKIPPED.
        """
        # 1. Of each row: whose it is, which output token it gives, and what is proposed there.
        owners, states, positions, drafts = [], [], [], []
        for request, rows in zip(batch.requests, batch.logit_rows, strict=True):
            for i, row in enumerate(rows):
                owners.append(request)
                states.append(_after(request, i))
                positions.append(batch.positions[row] + 1 - request.num_prompt_tokens)
                drafts.append(request.draft_ids[i] if i + 1 < len(rows) else None)
        if all(state.temperature == 0 for state in states):
            chosen = _greedy(logits, states, positions)
        else:
            chosen = self._sampled(logits, owners, states, positions, drafts)
        # 2. Behind the first token that is not its draft there is nothing.
        tokens, start = [], 0
        for rows in batch.logit_rows:
            stands = True
            for row in range(start, start + len(rows)):
                tokens.append(chosen[row] if stands else SKIPPED)
                stands = stands and chosen[row] == drafts[row]
            start += len(rows)
        return torch.tensor(tokens, dtype=torch.int64)

    def _sampled(
        self,
        logits: Tensor,
        owners: Sequence[Request],
        states: Sequence[SamplingState],
        positions: Sequence[int],
        drafts: Sequence[int | None],
    ) -> list[int]:
        """Each row's token: its draft if that is accepted, else one drawn from what the draft left over."""
        p = distribution(logits, states, positions)  # [R, V]
        q = torch.zeros_like(p)  # what each row's draft was drawn from; without a draft: nothing
        proposed = [row for row, draft in enumerate(drafts) if draft is not None]
        for row in proposed:
            own = self.proposals.get(owners[row].id)
            place = sum(owner is owners[row] for owner in owners[:row])
            if own is None or states[row].temperature == 0:
                q[row, drafts[row]] = 1.0
            else:
                q[row] = own[place]
        # A draft is accepted with probability min(1, p / q).
        ids = [drafts[row] or 0 for row in range(len(drafts))]
        at = torch.arange(len(ids)), torch.tensor(ids)
        both = zip(p[at].double().tolist(), q[at].double().tolist(), strict=True)
        accepted = [
            drafts[row] is not None and uniform(states[row].seed ^ ACCEPT, positions[row]) * proposal < target
            for row, (target, proposal) in enumerate(both)
        ]
        drawn = draw(residual(p, q), [state.seed for state in states], positions).tolist()
        broken = (~logits.amax(-1).isfinite()).tolist()
        return [
            NO_TOKEN if broken[row] else drafts[row] if accepted[row] else drawn[row]
            for row in range(len(drafts))
        ]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p[R, V], q[R, V] -> [R, V]: what a rejected draft's successor is drawn from, where p is larger than q;
    p itself where nothing is (in exact arithmetic nothing is rejected there). Not normalized.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _greedy(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[int]:
    best, token_ids = adjust(logits, states, positions).max(-1)
    return torch.where(best.isfinite(), token_ids, NO_TOKEN).tolist()


def _after(request: Request, i: int) -> SamplingState:
    """The request's state behind its first `i` drafts: penalties count them as output."""
    state = request.sampling
    if not i or not state.is_adjusted:
        return state
    output_ids = [*state.output_ids, *request.draft_ids[:i]]
    return SamplingState(state.params, state.prompt_ids, output_ids, state.seed, state.stop_ids)
