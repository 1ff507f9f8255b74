"""Runs steps on one device: the record of a step in, tokens out. Part 6.

A runner is made of items that are handed in, so that what later parts bring is one more item: a way to
compute a pass (a CUDA graph, Part 13), something to do before it (LoRA's rows, Part 18), how tokens are
chosen (a rejection sampler, Part 16), scores (Part 10). `submit` does not wait for the device; `result`
does.
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
    """Has steps computed, on one device or on several (Part A)."""

    def submit(self, batch: Batch) -> Pending:
        """Start the step, and do not wait for it. Raises whatever fails at its start."""


class Logits(NamedTuple):
    """What a pass of the model gives."""

    values: Tensor  # [R, V]: of the rows `Rows.chosen`
    likeliest: Tensor | None = None  # [R]: if the pass computes them anyway (NO_TOKEN: none is finite)
    prompt_hidden: Tensor | None = None  # [N, D]: hidden states of the rows `Rows.prompt` (Part 10)


class Way(Protocol):
    """How a pass is computed."""

    def fits(self, batch: Batch) -> bool:
        """Whether this way can compute the step."""

    def __call__(self, batch: Batch) -> Logits: ...


class Inputs(NamedTuple):
    """The model's inputs, and the rows that are read, on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    chosen: Tensor  # [R]: rows
    prompt: Tensor  # [N]: rows


def upload(batch: Batch, device: torch.device) -> Inputs:
    """The record's numbers on the device, brought there in one copy."""
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
        to the device; where steps run ahead, it replaces placeholders by the tokens they stand for (Part 13).
        """
        self.model, self.memory, self.upload = model, memory, upload
        self.forward = forward or model
        self.device = next(model.parameters()).device

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        inputs = self.upload(batch, self.device)
        hidden = self.forward(inputs.token_ids, inputs.positions, self.memory.attention(batch))  # [T, D]
        rows = batch.rows
        chosen = hidden if len(rows.chosen) == batch.num_tokens else hidden[inputs.chosen]  # [R, D]
        prompt = hidden[inputs.prompt] if rows.prompt else None  # [N, D]
        return Logits(self.model.logits(chosen), prompt_hidden=prompt)


Select = Callable[[Logits, Batch], Tensor]  # -> token ids[R], one for each row that is chosen from


def choose(logits: Logits, batch: Batch) -> Tensor:
    """token ids[R], each sampled by its row's parameters."""
    draws = batch.draws
    if logits.likeliest is not None and not any(row.temperature or row.is_adjusted for row in draws.rows):
        return logits.likeliest
    return sample(logits.values, draws.rows, draws.positions)


class Score(Protocol):
    """Something else that is computed from a step's logits, for requests that ask for it (Part 10)."""

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """token ids[R] -> tensors to copy to the host with them. None: no request of the step asks."""

    def add_to(self, result: StepResult, batch: Batch, arrays: Sequence[np.ndarray]) -> StepResult:
        """The result, with what the arrays say: token ids[R], then those tensors, on the host."""


class LastTokens(Protocol):
    """Keeps chosen tokens on the device, for a step that is launched before they are read (Part 13)."""

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """Keep token_ids[R] of this step, in place of the last one's."""


class ModelRunner:
    """One device. The ways are tried in order: the first that fits computes the pass."""

    def __init__(
        self,
        ways: Sequence[Way],
        memory: KVMemory | None = None,
        before: Sequence[Callable[[Batch], None]] = (),
        select: Select = choose,
        scores: Sequence[Score] = (),
        last_tokens: LastTokens | None = None,
    ) -> None:
        """`memory` makes the copies of a step; None: no step has any. `before`: called with each batch before
        its pass. `select` chooses the tokens. `last_tokens` keeps them on the device.
        """
        self.ways, self.memory, self.before = list(ways), memory, list(before)
        self.select, self.scores, self.last_tokens = select, list(scores), last_tokens

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Pending:
        """Give the device all it has to do for a step. Raises whatever fails before that is done, such as
        torch.OutOfMemoryError; and ValueError: the step has copies, and this runner has no memory.
        """
        # 1. Copies of blocks, and whatever else was handed in to be done before.
        if self.memory is not None:
            self.memory.apply(batch.copies)
        elif batch.copies:
            raise ValueError(f"{len(batch.copies)} copies of blocks, and this runner has no memory")
        for prepare in self.before:
            prepare(batch)
        # 2. The pass, and the choice.
        logits = next(way for way in self.ways if way.fits(batch))(batch)
        token_ids = self.select(logits, batch)  # [R]
        if self.last_tokens is not None:
            self.last_tokens.remember(batch, token_ids)
        # 3. Scores, for requests that ask: they are copied to the host together with the tokens.
        computed = [(score, score(logits, token_ids, batch)) for score in self.scores]
        scores = [(score, tensors) for score, tensors in computed if tensors is not None]
        return SubmittedStep(batch, token_ids, scores)


class SubmittedStep:
    """A `Pending` step: the device computes it, and copies its tokens to the host."""

    def __init__(self, batch: Batch, token_ids: Tensor, scores: list[tuple[Score, list[Tensor]]]) -> None:
        self.batch, self.scores = batch, scores
        self._tensors = [token_ids, *(tensor for _, tensors in scores for tensor in tensors)]
        self._host_copy = HostCopy(_pack(self._tensors) if scores else token_ids)

    def result(self) -> StepResult:
        """The tokens that were chosen, by sequence, with scores. Raises what failed on the device."""
        # 1. The one place that waits for the device.
        if self.scores:
            token_ids, *arrays = _unpack(self._host_copy.read(), self._tensors)
        else:
            token_ids, arrays = self._host_copy.read(), []
        # 2. Tokens by sequence: in most steps one each.
        chosen, counts = token_ids.tolist(), self.batch.rows.counts
        if len(chosen) == len(counts) and all(counts):
            tokens = [[token_id] for token_id in chosen]
        else:
            tokens, start = [], 0
            for count in counts:
                tokens.append(chosen[start : start + count])
                start += count
        # 3. Each score takes its own arrays, which come in the same order.
        result = StepResult(tokens)
        for score, tensors in self.scores:
            result = score.add_to(result, self.batch, [token_ids, *arrays[: len(tensors)]])
            arrays = arrays[len(tensors) :]
        return result


class HostCopy:
    """A copy of a tensor on the host, under way. `read` waits for this copy alone, not for work that the
    device was given since.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = tensor.clone()  # the next step may write the tensor itself

    def read(self) -> np.ndarray:
        """The tensor's numbers, once the copy is done."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """int32[n]: all numbers of these tensors, fp32 as its bits, so that one copy takes them to the host."""
    device = tensors[0].device
    numbers = []
    for tensor in tensors:
        four_bytes = tensor if tensor.is_floating_point() else tensor.int()  # each number is fp32 or int32
        numbers.append(four_bytes.to(device).reshape(-1).view(torch.int32))
    return torch.cat(numbers)


def _unpack(numbers: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """The numbers that were packed, int32[n], in the shapes of these tensors: fp32 or int32."""
    arrays, start = [], 0
    for tensor in like:
        part = numbers[start : start + tensor.numel()]
        dtype = np.float32 if tensor.is_floating_point() else np.int32
        arrays.append(part.view(dtype).reshape(tensor.shape))
        start += tensor.numel()
    return arrays
