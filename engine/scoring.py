"""An executor whose results carry log probabilities, for the requests that ask for them. Part 10.

Promises that the tokens are those of the plain executor; that a step in which nobody asks does nothing more;
that all of a step's numbers come from the device at once; and that a prompt's logits are never there all
together: the output layer gets its rows in chunks. Which row speaks of which token is settled here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.decoding.logprobs import Scores, TokenScores, score_in_chunks, token_text
from engine.decoding.sampling import NO_TOKEN
from engine.device import on_device
from engine.executor import Executor, Pending, StepResult, sample_batch
from engine.scheduling.request import Request
from engine.tokenizer import Tokenizer


class ScoringForward(Protocol):
    """A forward pass that can stop before the output layer, as `ModelForward` does."""

    def __call__(self, batch: Batch) -> Tensor:
        """logits[R, V] of the rows the batch wants."""

    def hidden(self, batch: Batch) -> Tensor:
        """hidden[R, D] of these rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V], for any R."""


class Spoken(NamedTuple):
    """What the rows of one sequence speak of: the first ones of `prompt_ids`, one each; the last `num_next`
    of tokens to be chosen.
    """

    prompt_ids: list[int]
    num_next: int


def spoken_of(request: Request, positions: range) -> Spoken:
    """What the rows of logits at these positions of the request's tokens speak of.

    A row speaks of the token that comes after its own. If that is a token of the prompt, and the request
    wants every row, it is to be scored. If nobody knows it yet, it is to be chosen: so after the last of
    `request.token_ids`, and after each draft behind that one. Between the two, a request that was preempted
    has rows that speak of its own output so far; these are of no use. For who does not want every row
    (`request.wants_every_row`), the batch has none but those to choose from.
    """
    if not request.wants_every_row or not positions:
        return Spoken([], len(positions))
    prompt_ids = request.token_ids[positions.start + 1 : min(positions.stop + 1, request.num_prompt_tokens)]
    last_known = len(request.token_ids) - 1
    return Spoken(prompt_ids, max(0, positions.stop - max(positions.start, last_known)))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is wanted of the R rows of a step. Rows are counted among these R."""

    spoken: list[Spoken]  # [S]
    next_rows: list[int]  # a token is chosen from each
    scored: list[int]  # places in `next_rows`: those whose token's log probability is wanted
    prompt_rows: list[int]  # each speaks of a token of a prompt:
    prompt_ids: list[int]  # of these


def plan_of(batch: Batch) -> Plan:
    """Who wants what of which row."""
    plan, start = Plan([], [], [], [], []), 0
    for request, rows in zip(batch.requests, batch.logit_rows, strict=True):
        first = batch.positions[rows.start] if rows else 0
        own = spoken_of(request, range(first, first + len(rows)))
        plan.spoken.append(own)
        plan.prompt_rows.extend(range(start, start + len(own.prompt_ids)))
        plan.prompt_ids.extend(own.prompt_ids)
        start += len(rows)
        if request.params.logprobs is not None:
            plan.scored.extend(range(len(plan.next_rows), len(plan.next_rows) + own.num_next))
        plan.next_rows.extend(range(start - own.num_next, start))
    return plan


def _asks(request: Request) -> bool:
    return request.params.logprobs is not None or request.params.prompt_logprobs is not None


class ScoringExecutor(Executor):
    """Forward, then sample, then score what was chosen and what stands in the prompts."""

    def __init__(
        self,
        forward: ScoringForward,
        tokenizer: Tokenizer,
        sampler: Callable[[Tensor, Batch], Tensor] = sample_batch,
    ) -> None:
        """`tokenizer` says how a token is shown."""
        super().__init__(forward, sampler)
        self.text = partial(token_text, tokenizer)

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        # 1. Does anybody ask? If not, this is a step like any other.
        if not any(map(_asks, batch.requests)):
            return super().submit(batch)
        plan = plan_of(batch)
        # 2. The model. Rows inside a prompt stop before the output layer, which makes V numbers of each.
        if len(plan.next_rows) == sum(map(len, batch.logit_rows)):
            logits = self.forward(batch)  # [R, V]
        else:
            hidden = self.forward.hidden(batch)  # [R, D]
            next_rows, prompt_rows, prompt_ids = on_device(
                hidden.device, plan.next_rows, plan.prompt_rows, plan.prompt_ids
            )
            logits = self.forward.logits(hidden[next_rows])  # [R', V], one for each token to be chosen
            batch = replace(
                batch,
                logit_rows=tuple(
                    rows[len(rows) - own.num_next :]
                    for rows, own in zip(batch.logit_rows, plan.spoken, strict=True)
                ),
            )
        # 3. The choice, as ever. It leaves `logits` as they are.
        token_ids = self.sampler(logits, batch).to(logits.device)  # [R']; a Verifier's are on the host
        found, V = [token_ids], logits.shape[-1]
        # 4. Scores of the chosen tokens, for those who ask.
        if plan.scored:
            raw, chosen = logits, token_ids
            if len(plan.scored) < len(plan.next_rows):
                (scored,) = on_device(logits.device, plan.scored)
                raw, chosen = logits[scored], token_ids[scored]
            n = max(r.params.logprobs or 0 for r in batch.requests)
            found += score_in_chunks(raw.__getitem__, chosen.clamp(min=0), n, V)  # NO_TOKEN is no place
        # 5. Scores of the prompts' tokens, a chunk of rows through the output layer at a time.
        if plan.prompt_rows:

            def logits_of(rows: slice) -> Tensor:
                return self.forward.logits(hidden[prompt_rows[rows]])

            n = max(r.params.prompt_logprobs or 0 for r in batch.requests)
            found += score_in_chunks(logits_of, prompt_ids, n, V)
        return ScoredPending(batch, token_ids, plan, found, _packed(found), self.text)


@dataclass(frozen=True)
class ScoredPending(Pending):
    """A step under way, some of whose rows are scored. `batch` wants the rows that a token is chosen from."""

    plan: Plan
    # token_ids, then Scores of `plan.scored` and of `plan.prompt_rows`, where there are any
    found: list[Tensor]
    packed: Tensor  # all of them in one
    text: Callable[[int], str]

    def result(self) -> StepResult:
        plan = self.plan
        token_ids, *scores = _unpacked(self.packed, self.found)  # the one place that waits for the device
        chosen = iter(token_ids.tolist())
        outputs = _Rows(token_ids[plan.scored], scores[:4], self.text) if plan.scored else None
        prompts = _Rows(np.array(plan.prompt_ids), scores[-4:], self.text) if plan.prompt_rows else None
        result = StepResult([], None, [], [])
        for s, (request, own) in enumerate(zip(self.batch.requests, plan.spoken, strict=True)):
            params = request.params
            tokens = [next(chosen) for _ in range(own.num_next)]
            asked = own.num_next if params.logprobs is not None else 0
            result.logprobs.append(outputs.take(asked, params.logprobs) if asked else [])
            count = len(own.prompt_ids)
            prompt = prompts.take(count, params.prompt_logprobs) if count else []
            if any(math.isnan(scores.logprob) for scores in prompt):
                tokens = [NO_TOKEN]  # as for a token that cannot be chosen: the request fails
            first = self.batch.positions[self.batch.query_start[s]]
            result.prompt_logprobs.append(
                [None, *prompt] if request.wants_every_row and not first else prompt
            )
            result.tokens.append(tokens)
        return result


class _Rows:
    """Scores that have come from the device, handed out in order."""

    def __init__(
        self, token_ids: np.ndarray, scores: Sequence[np.ndarray], text: Callable[[int], str]
    ) -> None:
        own, self.ranks, top_ids, top_logprobs = Scores(*scores)
        self.ids = np.concatenate([token_ids[:, None], top_ids], axis=1)  # [R, 1+n]
        self.logprobs = np.concatenate([own[:, None], top_logprobs], axis=1)  # [R, 1+n]
        self.text, self._taken = text, 0

    def take(self, count: int, n: int) -> list[TokenScores]:
        """The next `count` rows, each with its n likeliest tokens: copies, so that none keeps the others."""
        rows = range(self._taken, self._taken + count)
        self._taken = rows.stop
        return [
            TokenScores(
                self.ids[row, : n + 1].copy(),
                self.logprobs[row, : n + 1].copy(),
                int(self.ranks[row]),
                self.text,
            )
            for row in rows
        ]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """int32[N]: all numbers of these tensors, fp32 by its bits."""
    flat = [(t if t.is_floating_point() else t.int()).reshape(-1).view(torch.int32) for t in tensors]
    return torch.cat(flat)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[np.ndarray]:
    """The numbers in `packed`, on the host, in the shapes and kinds of these tensors."""
    numbers = packed.cpu().numpy()
    ends = accumulate((t.numel() for t in like), initial=0)
    return [
        numbers[start:end].view(np.float32 if t.is_floating_point() else np.int32).reshape(t.shape)
        for t, (start, end) in zip(like, pairwise(ends), strict=True)
    ]
