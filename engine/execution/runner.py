"""Runs steps on one device: the record of a step in, tokens out. Part 6.

A runner is made of parts that are handed in, so that what later parts bring is one more item: a way to
compute a pass (a CUDA graph, Part 13), something to do before it (LoRA's rows, Part 18), who chooses (a
rejection sampler, Part 16), what is scored (Part 10). `submit` does not wait for the device; `result` does.
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
    """Who has a step computed, on one device or on several (Part A)."""

    def submit(self, batch: Batch) -> Pending:
        """Begin the step, without waiting for it. Raises what goes wrong at once."""


class Logits(NamedTuple):
    """What a pass of the model says."""

    values: Tensor  # [R, V], a row for each token to be chosen
    likeliest: Tensor | None = None  # [R]: where the pass has them by the way (NO_TOKEN: none is finite)
    prompt_hidden: Tensor | None = None  # [N, D]: of the rows that speak of the prompt's tokens (Part 10)


class Way(Protocol):
    """How a pass is computed."""

    def fits(self, batch: Batch) -> bool:
        """Whether it can compute this one."""

    def __call__(self, batch: Batch) -> Logits: ...


class Inputs(NamedTuple):
    """The record's numbers, on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    chosen: Tensor  # [R]: rows
    prompt: Tensor  # [N]: rows


def upload(batch: Batch, device: torch.device) -> Inputs:
    """As they are, in one copy."""
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
        """`forward`: called as the model is; default: the model itself. `upload`: who brings the record's
        numbers to the device; where steps run ahead, it knows what placeholders stand for (Part 13).
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


Select = Callable[[Logits, Batch], Tensor]  # token ids[R]: the choice


def choose(logits: Logits, batch: Batch) -> Tensor:
    """token ids[R], by each row's own parameters."""
    draws = batch.draws
    if logits.likeliest is not None and not any(row.temperature or row.is_adjusted for row in draws.rows):
        return logits.likeliest
    return sample(logits.values, draws.rows, draws.positions)


class Score(Protocol):
    """Something else to find out about a step's rows, for who asks (Part 10)."""

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """token ids[R] -> what is to come home with them; None: nobody asks."""

    def told(self, result: StepResult, batch: Batch, arrays: Sequence[np.ndarray]) -> StepResult:
        """The result with what came home: token ids[R], then those tensors, in their shapes."""


class LastTokens(Protocol):
    """Where chosen tokens stay, for steps that are launched before anybody has read them (Part 13)."""

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """token_ids[R] of this step."""


class ModelRunner:
    """One device. The ways are tried in order: the first that fits computes the pass."""

    def __init__(
        self,
        ways: Sequence[Way],
        memory: KVMemory | None = None,
        before: Sequence[Callable[[Batch], None]] = (),
        select: Select = choose,
        scores: Sequence[Score] = (),
        last: LastTokens | None = None,
    ) -> None:
        """`memory`: whose copies are made before a step; None: no step has any."""
        self.ways, self.memory = list(ways), memory
        self.before, self.select, self.scores, self.last = list(before), select, list(scores), last

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        """Give the device all it has to do for a step. Raises what goes wrong at once: out of memory, say."""
        # 1. What must be there before: blocks in their places, and whatever was handed in.
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
        # 3. What is asked beside: it goes home together with the tokens.
        beside = [(score, score(logits, token_ids, batch)) for score in self.scores]
        asked = [(score, tensors) for score, tensors in beside if tensors is not None]
        return Submitted(batch, token_ids, asked)


class Submitted:
    """A step on the device, whose tokens are on their way home."""

    def __init__(self, batch: Batch, token_ids: Tensor, beside: list[tuple[Score, list[Tensor]]]) -> None:
        self.batch, self.beside = batch, beside
        self._tensors = [token_ids, *(tensor for _, tensors in beside for tensor in tensors)]
        self._home = OnItsWay(_packed(self._tensors) if beside else token_ids)

    def result(self) -> StepResult:
        """The tokens that were chosen, by sequence, and what was asked beside."""
        # 1. The one place that waits for the device.
        if self.beside:
            token_ids, *arrays = _unpacked(self._home.read(), self._tensors)
        else:
            token_ids, arrays = self._home.read(), []
        # 2. Tokens by sequence: mostly one each.
        chosen, counts = token_ids.tolist(), self.batch.rows.counts
        if len(chosen) == len(counts) and all(counts):
            tokens = [[token_id] for token_id in chosen]
        else:
            tokens, start = [], 0
            for count in counts:
                tokens.append(chosen[start : start + count])
                start += count
        # 3. What was asked beside.
        result = StepResult(tokens)
        for score, tensors in self.beside:
            result = score.told(result, self.batch, [token_ids, *arrays[: len(tensors)]])
            arrays = arrays[len(tensors) :]
        return result


class OnItsWay:
    """A tensor whose copy to the host has begun. Who reads it waits for this copy alone, not for what the
    device was given to do since.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = tensor.clone()  # where it lies, the next step may write

    def read(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """int32[N]: all numbers of these tensors, fp32 by its bits: they come home in one copy."""
    device = tensors[0].device
    flat = [
        (t if t.is_floating_point() else t.int()).to(device).reshape(-1).view(torch.int32) for t in tensors
    ]
    return torch.cat(flat)


def _unpacked(numbers: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """The numbers that were packed, in the shapes and kinds of these tensors."""
    arrays, start = [], 0
    for tensor in like:
        part = numbers[start : start + tensor.numel()]
        kind = np.float32 if tensor.is_floating_point() else np.int32
        arrays.append(part.view(kind).reshape(tensor.shape))
        start += tensor.numel()
    return arrays
