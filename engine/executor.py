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


@dataclass(frozen=True)
class StepResult:
    """What a step found, by sequence of its batch."""

    tokens: list[list[int]]  # [S]: new ones: none for an incomplete prompt, several with drafts (Part 16)
    drafts: list[list[int]] | None = None  # proposals to verify in the next step (Part 16)
    logprobs: list[Logprobs] | None = None  # of each new token, by sequence (Part 10)
    prompt_logprobs: list[Logprobs] | None = None  # of the prompt tokens in this step, by sequence (Part 10)


@dataclass(frozen=True)
class Pending:
    """A step under way."""

    batch: Batch
    token_ids: Tensor  # [R], one for each row of logits

    def result(self) -> StepResult:
        found = iter(self.token_ids.tolist())  # the one place that waits for the device
        return StepResult([[next(found) for _ in rows] for rows in self.batch.logit_rows])


class ModelForward:
    """Batch -> logits[R, V], for the rows the batch wants."""

    def __init__(self, model: nn.Module, cache: KVCacheManager) -> None:
        self.model, self.cache = model, cache
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        token_ids = torch.tensor(batch.token_ids).to(self.device, non_blocking=True)  # [T]
        positions = torch.tensor(batch.positions).to(self.device, non_blocking=True)  # [T]
        hidden = self.model(token_ids, positions, self.cache.attention(batch))  # [T, D]
        rows = [row for rows in batch.logit_rows for row in rows]
        if len(rows) < batch.num_tokens:
            hidden = hidden[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return self.model.logits(hidden)  # [R, V]


@torch.inference_mode()
def sample_batch(logits: Tensor, batch: Batch) -> Tensor:
    """logits[R, V] -> token ids[R], by each request's own parameters."""
    rows = [request.row for request, rows in zip(batch.requests, batch.logit_rows, strict=True) for _ in rows]
    return sample(logits, rows)


class Executor:
    """One step at a time: forward, then sample."""

    def __init__(
        self, forward: Callable[[Batch], Tensor], sampler: Callable[[Tensor, Batch], Tensor] = sample_batch
    ) -> None:
        self.forward, self.sampler = forward, sampler

    def submit(self, batch: Batch) -> Pending:
        return Pending(batch, self.sampler(self.forward(batch), batch))
