"""Runs one step on the device: batch in, tokens out. Part 6.

The forward pass and the sampler are handed in, so CUDA graphs (Part 13), logprobs (Part 10) and speculation
(Part 16) wrap or replace one of them. `submit` may return before the device is done; `result` waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.cache.manager import KVCacheManager
from engine.decoding.outputs import Logprobs
from engine.decoding.sampling import sample
from engine.device import on_device


@dataclass(frozen=True)
class StepResult:
    """What a step found, by sequence of its batch."""

    tokens: list[list[int]]  # [S]: new ones: none for an incomplete prompt, several with drafts (Part 16)
    drafts: list[list[int]] | None = None  # proposals to verify in the next step (Part 16)
    logprobs: list[Logprobs] | None = None  # of each new token, by sequence (Part 10)
    prompt_logprobs: list[Logprobs] | None = None  # of the prompt tokens in this step, by sequence (Part 10)
    counters: dict[str, float] | None = None  # for the step's record: what an executor has to tell of it


@dataclass(frozen=True)
class Pending:
    """A step under way."""

    batch: Batch
    token_ids: Tensor  # [R], one for each row of logits

    def result(self) -> StepResult:
        found = self.token_ids.tolist()  # the one place that waits for the device
        batch = self.batch
        one_each = len(found) == len(batch.requests) == batch.num_tokens  # a token each, and its row
        if one_each and not any(request.wants_every_row for request in batch.requests):  # all decode
            return StepResult([[token_id] for token_id in found])
        tokens, start = [], 0
        for request, rows in zip(batch.requests, batch.logit_rows, strict=True):
            # What follows a token inside the prompt is known: only its log probability was wanted (Part 10).
            inside = sum(batch.positions[row] < request.num_prompt_tokens - 1 for row in rows)
            tokens.append(found[start + inside : start + len(rows)])
            start += len(rows)
        return StepResult(tokens)


class ModelForward:
    """Batch -> logits[R, V], for the rows the batch wants; or in two steps: `hidden`, `logits` (Part 10)."""

    def __init__(self, model: nn.Module, cache: KVCacheManager) -> None:
        self.model, self.cache = model, cache
        self._run = model  # (token ids, positions, attend) -> hidden
        self.device = next(model.parameters()).device

    def __call__(self, batch: Batch) -> Tensor:
        return self.logits(self.hidden(batch))

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """hidden[R, D] of these rows, before the output layer."""
        token_ids, positions, wanted = self.inputs(batch)
        hidden = self._run(token_ids, positions, self.cache.attention(batch))  # [T, D]
        return hidden if len(wanted) == batch.num_tokens else hidden[wanted]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """token ids[T], positions[T], and which of the T rows the batch wants, [R], on the device."""
        rows = [row for rows in batch.logit_rows for row in rows]
        return on_device(self.device, batch.token_ids, batch.positions, rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V]."""
        return self.model.logits(hidden)


@torch.inference_mode()
def sample_batch(logits: Tensor, batch: Batch) -> Tensor:
    """logits[R, V] -> token ids[R], by each request's own parameters. Which output token a row gives is read
    from the batch: the request may not know of the one before yet (Part 13).
    """
    rows, positions = [], []
    for request, own in zip(batch.requests, batch.logit_rows, strict=True):
        for row in own:
            rows.append(request.sampling)
            positions.append(batch.positions[row] + 1 - request.num_prompt_tokens)
    return sample(logits, rows, positions)


class Executor:
    """One step at a time: forward, then sample."""

    def __init__(
        self, forward: Callable[[Batch], Tensor], sampler: Callable[[Tensor, Batch], Tensor] = sample_batch
    ) -> None:
        self.forward, self.sampler = forward, sampler

    def submit(self, batch: Batch) -> Pending:
        return Pending(batch, self.sampler(self.forward(batch), batch))
