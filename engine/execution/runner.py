"""Runs steps on one device: the record of a step in, tokens out. Part 6.

A runner is made of parts that are handed in, so that a later part adds an item: a way to compute a pass (a
CUDA graph, Part 13), work to do before it (LoRA's rows, Part 18), how tokens are chosen (a rejection sampler,
Part 16), what is scored (Part 10). `submit` does not wait for the device; `result` does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.cache.manager import KVMemory
from engine.decoding.sampling import sample
from engine.machine.device import on_device
from engine.models.language_model import LanguageModel
from engine.requests.batch import Batch
from engine.requests.step import Pending, StepResult


class Executor(Protocol):
    """Computes steps, on one device or on several (Part A)."""

    def submit(self, batch: Batch) -> Pending:
        """Begin the step, without waiting for it. Raises what goes wrong at once."""


class Logits(NamedTuple):
    """What a pass of the model gives."""

    values: Tensor  # [R, V], a row for each token to be chosen
    likeliest: Tensor | None = None  # [R], if the pass computes them (NO_TOKEN: no logit is finite)
    prompt_hidden: Tensor | None = None  # [N, D]: of the rows that score a prompt's tokens (Part 10)


class Way(Protocol):
    """A way to compute a pass."""

    def fits(self, batch: Batch) -> bool:
        """Whether it can compute this batch's pass."""

    def __call__(self, batch: Batch) -> Logits: ...


class Inputs(NamedTuple):
    """The record's numbers, on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    chosen: Tensor  # [R]: the rows whose next token is chosen
    prompt: Tensor  # [N]: the rows that score a prompt's tokens


def upload(batch: Batch, device: torch.device) -> Inputs:
    """The record's numbers as they are, in one copy."""
    rows = batch.rows
    return Inputs(*on_device(device, batch.token_ids, batch.positions, rows.chosen, rows.prompt))


class EagerWay:
    """The model's own forward pass, kernel by kernel: it fits any step."""

    def __init__(
        self,
        model: LanguageModel,
        memory: KVMemory,
        forward: Callable[..., Tensor] | None = None,
        upload: Callable[[Batch, torch.device], Inputs] = upload,
    ) -> None:
        """`forward`: called as the model is; default: the model itself. `upload`: brings the record's numbers
        to the device; where steps run ahead, it replaces placeholders by their tokens (Part 13).
        """
        self.model, self.memory, self.upload = model, memory, upload
        self.forward = forward or model
        self.device = next(model.parameters()).device

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        inputs = self.upload(batch, self.device)
        hidden = self.forward(inputs.token_ids, inputs.positions, self.memory.attention(batch))  # [T, D]
        chosen = hidden if len(inputs.chosen) == len(hidden) else hidden[inputs.chosen]  # [R, D]
        prompt = hidden[inputs.prompt] if len(inputs.prompt) else None  # [N, D]
        return Logits(self.model.logits(chosen), prompt_hidden=prompt)


Select = Callable[[Logits, Batch], Tensor]  # -> token_ids[R], one for each row of the logits


def choose(logits: Logits, batch: Batch) -> Tensor:
    """token_ids[R], by each row's own sampling parameters."""
    draws = batch.draws
    if logits.likeliest is not None and not any(row.temperature or row.is_adjusted for row in draws.rows):
        return logits.likeliest
    return sample(logits.values, draws.rows, draws.positions)


class Score(Protocol):
    """Something else that requests may ask about a step's rows (Part 10)."""

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """token_ids[R] -> tensors to copy to the host with them; None: no request asks."""

    def attach(self, result: StepResult, batch: Batch, arrays: Sequence[np.ndarray]) -> StepResult:
        """The result with the scores. `arrays`: token_ids[R], then those tensors, on the host."""


class LastTokens(Protocol):
    """Keeps chosen tokens on the device, for steps that are launched before the host reads them (Part 13)."""

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """token_ids[R] of this step."""


class ModelRunner:
    """Runs steps on one device. The ways are tried in order: the first that fits computes the pass."""

    def __init__(
        self,
        ways: Sequence[Way],
        memory: KVMemory | None = None,
        before: Sequence[Callable[[Batch], None]] = (),
        select: Select = choose,
        scores: Sequence[Score] = (),
        last: LastTokens | None = None,
    ) -> None:
        """`memory`: where a step's copies are made, before its pass; None: no step has any. `before`: called
        with each step's record before its pass.
        """
        self.ways, self.memory = list(ways), memory
        self.before, self.select, self.scores, self.last = list(before), select, list(scores), last

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        """Give the device all it has to do for a step. Raises what goes wrong at once: out of memory, say."""
        # 1. What the pass needs: blocks in their places, and what `before` prepares.
        if self.memory is not None:
            self.memory.apply(batch.copies)
        elif batch.copies:
            raise ValueError(f"{len(batch.copies)} copies of blocks, and this runner has no memory")
        for prepare in self.before:
            prepare(batch)
        # 2. The pass, and the choice.
        logits = next(way for way in self.ways if way.fits(batch))(batch)
        token_ids = self.select(logits, batch)  # [R]
        if self.last is not None:
            self.last.remember(batch, token_ids)
        # 3. The scores that requests ask for: they are copied to the host together with the tokens.
        scores: list[tuple[Score, list[Tensor]]] = []
        for score in self.scores:
            if (tensors := score(logits, token_ids, batch)) is not None:
                scores.append((score, tensors))
        return SubmittedStep(batch, token_ids, scores)


class SubmittedStep:
    """A step on the device, whose copy to the host has begun."""

    def __init__(self, batch: Batch, token_ids: Tensor, scores: list[tuple[Score, list[Tensor]]]) -> None:
        """token_ids[R]; `scores`: each with the tensors that it has computed."""
        self.batch, self.scores = batch, scores
        self._tensors = [token_ids, *(tensor for _, tensors in scores for tensor in tensors)]
        self._copy = HostCopy(_packed(self._tensors) if scores else token_ids)

    def result(self) -> StepResult:
        """The tokens that were chosen, by sequence, and their scores."""
        # 1. The one place that waits for the device.
        if self.scores:
            token_ids, *arrays = _unpacked(self._copy.read(), self._tensors)
        else:
            token_ids, arrays = self._copy.read(), []
        # 2. Tokens by sequence: mostly one each.
        chosen, counts = token_ids.tolist(), self.batch.rows.counts
        if len(chosen) == len(counts) and all(counts):
            tokens = [[token_id] for token_id in chosen]
        else:
            tokens, start = [], 0
            for count in counts:
                tokens.append(chosen[start : start + count])
                start += count
        # 3. The scores.
        result = StepResult(tokens)
        for score, tensors in self.scores:
            result = score.attach(result, self.batch, [token_ids, *arrays[: len(tensors)]])
            arrays = arrays[len(tensors) :]
        return result


class HostCopy:
    """A tensor's copy to the host, which has begun. `read` waits for this copy alone, not for what the device
    was given to do since.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = tensor.clone()  # the next step may write to `tensor` itself

    def read(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy()


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """int32[N]: all numbers of these tensors end to end, of fp32 its bits. So one copy takes all of them."""
    device, flat = tensors[0].device, []
    for tensor in tensors:
        in_32_bits = tensor if tensor.is_floating_point() else tensor.int()
        flat.append(in_32_bits.to(device).reshape(-1).view(torch.int32))
    return torch.cat(flat)


def _unpacked(numbers: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """The numbers that were packed, in the shapes of these tensors, as fp32 or int32."""
    arrays, start = [], 0
    for tensor in like:
        part = numbers[start : start + tensor.numel()]
        dtype = np.float32 if tensor.is_floating_point() else np.int32
        arrays.append(part.view(dtype).reshape(tensor.shape))
        start += tensor.numel()
    return arrays
