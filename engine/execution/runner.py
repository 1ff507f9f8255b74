"""Runs steps on one device: the record of a step in, tokens out. Part 6.

Parts of a runner can be exchanged or added: ways to compute a pass (Part 13 adds CUDA graphs), functions that
run before the pass (Part 18: LoRA's rows), the choice of tokens (Part 16: a rejection sampler), and scores
(Part 10). `submit` does not wait for the device; `result` does.
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
    """Computes steps, on one device or on several (Extension A)."""

    def submit(self, batch: Batch) -> Pending:
        """Start a step, without a wait for its result. Raises any exception of the start."""

    def on_lost(self, callback: Callable[[BaseException], None]) -> None:
        """Have `callback` called, in any thread, when no step can be computed any more."""

    def shutdown(self) -> None:
        """End all processes that compute for this executor. No step may follow."""


class Logits(NamedTuple):
    """The result of a pass of the model."""

    values: Tensor  # [R, V]: logits of the rows `Rows.chosen`
    likeliest: Tensor | None = None  # [R]: token ids, or NO_TOKEN; None if the pass does not compute them
    prompt_hidden: Tensor | None = None  # [N, D]: hidden states of the rows `Rows.prompt_rows` (Part 10)


class Way(Protocol):
    """A way to compute a pass of the model."""

    def fits(self, batch: Batch) -> bool:
        """Whether this way can compute the step."""

    def __call__(self, batch: Batch) -> Logits:
        """Compute the step's pass. The next call may overwrite the logits."""


class Inputs(NamedTuple):
    """The model's inputs on the device, and the indices of the rows whose results are read."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    chosen: Tensor  # [R]: rows from which tokens are chosen
    prompt: Tensor  # [N]: rows that are scored for a prompt's token


def upload_inputs(batch: Batch, device: torch.device) -> Inputs:
    """Copy the record's numbers to the device, in one copy."""
    rows = batch.rows
    return Inputs(*on_device(device, batch.token_ids, batch.positions, rows.chosen, rows.prompt_rows))


class EagerWay:
    """A `Way` that runs the model's own forward pass, kernel by kernel. It fits any step."""

    def __init__(
        self,
        model: LanguageModel,
        memory: KVMemory,
        forward: Callable[..., Tensor] | None = None,
        upload: Callable[[Batch, torch.device], Inputs] = upload_inputs,
    ) -> None:
        """`forward` is called in place of the model, with the model's arguments; None calls the model.
        `upload` copies the record's numbers to the device; if steps run ahead, it also puts tokens in place
        of their placeholders (Part 13).
        """
        self.model, self.memory, self.upload = model, memory, upload
        self.forward = model if forward is None else forward
        self.device = next(model.parameters()).device

    def fits(self, batch: Batch) -> bool:
        """True."""
        return True

    def __call__(self, batch: Batch) -> Logits:
        """Run the pass. Only the rows from which tokens are chosen go through the output layer."""
        inputs = self.upload(batch, self.device)
        hidden = self.forward(inputs.token_ids, inputs.positions, self.memory.attention(batch))  # [T, D]
        rows = batch.rows
        chosen = hidden if len(rows.chosen) == batch.num_tokens else hidden[inputs.chosen]  # [R, D]
        prompt = hidden[inputs.prompt] if rows.prompt_rows else None  # [N, D]
        return Logits(self.model.logits(chosen), prompt_hidden=prompt)


Select = Callable[[Logits, Batch], Tensor]  # -> token ids[R], one for each row that is chosen from


def choose(logits: Logits, batch: Batch) -> Tensor:
    """logits of R rows -> token ids[R], each sampled by the row's parameters, or NO_TOKEN."""
    draws = batch.draws
    if logits.likeliest is not None and not any(row.temperature or row.is_adjusted for row in draws.rows):
        return logits.likeliest
    return sample(logits.values, draws.rows, draws.positions)


class Score(Protocol):
    """Numbers that are computed from a step's logits, for requests that ask for them (Part 10)."""

    def __call__(self, logits: Logits, token_ids: Tensor, batch: Batch) -> list[Tensor] | None:
        """Compute tensors, which are copied to the host together with token_ids[R]. Returns None if no
        request of the step asks for this score.
        """

    def add_to(
        self, result: StepResult, batch: Batch, token_ids: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> StepResult:
        """Return `result` with this score. On the host: `token_ids`[R], and the tensors that `__call__`
        returned, as `arrays`.
        """


class TokenKeeper(Protocol):
    """Keeps chosen tokens on the device, for a step that is launched before they are read: `LastTokens` of
    Part 13.
    """

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """Keep token_ids[R] of this step, in place of those of the last step."""


class ModelRunner:
    """An `Executor` on one device. The first of its ways that fits a step computes the pass."""

    def __init__(
        self,
        ways: Sequence[Way],
        memory: KVMemory | None = None,
        before: Sequence[Callable[[Batch], None]] = (),
        select: Select = choose,
        scores: Sequence[Score] = (),
        last_tokens: TokenKeeper | None = None,
    ) -> None:
        """At least one of `ways` must fit each step. `memory` makes the copies of a step; None if no step has
        copies. Each function of `before` is called with the batch before the pass. `select` chooses the
        tokens. `scores` add scores to the result. `last_tokens` keeps the tokens on the device for the next
        step; None if steps do not run ahead.
        """
        self.ways, self.memory, self.before = list(ways), memory, list(before)
        self.select, self.scores, self.last_tokens = select, list(scores), last_tokens

    def way_number(self, batch: Batch) -> int:
        """The number of the way that computes this step: the first that fits."""
        return next(number for number, way in enumerate(self.ways) if way.fits(batch))

    @torch.inference_mode()
    def submit(self, batch: Batch, way_number: int | None = None) -> "SubmittedStep":
        """Queue all work of a step on the device. `way_number` is that of the way that computes the step;
        None takes the first that fits. (In Extension A, rank 0 chooses for all ranks.)

        Raises any exception on the way, such as torch.OutOfMemoryError, and ValueError if the step has copies
        and this runner has no memory.
        """
        # 1. Copies of blocks, and the functions of `before`.
        if self.memory is not None:
            self.memory.apply(batch.copies)
        elif batch.copies:
            raise ValueError(f"{len(batch.copies)} copies of blocks, and this runner has no memory")
        for prepare in self.before:
            prepare(batch)
        # 2. The pass of the model, and the choice of tokens.
        if way_number is None:
            way_number = self.way_number(batch)
        logits = self.ways[way_number](batch)
        token_ids = self.select(logits, batch)  # [R]
        if self.last_tokens is not None:
            self.last_tokens.remember(batch, token_ids)
        # 3. Scores, if a request asks. They are copied to the host together with the tokens.
        scores: list[tuple[Score, list[Tensor]]] = []
        for score in self.scores:
            tensors = score(logits, token_ids, batch)
            if tensors is not None:
                scores.append((score, tensors))
        return SubmittedStep(batch, token_ids, scores)

    def on_lost(self, callback: Callable[[BaseException], None]) -> None:
        """Does nothing: a runner is lost only when its process ends."""

    def shutdown(self) -> None:
        """Does nothing: a runner starts no process."""


class SubmittedStep:
    """A `Pending` step, which the device computes. The device then copies the tokens to the host."""

    def __init__(self, batch: Batch, token_ids: Tensor, scores: list[tuple[Score, list[Tensor]]]) -> None:
        """`token_ids`[R] are on the device, and so are the tensors of each score."""
        self.batch, self.scores = batch, scores
        self._tensors = [token_ids]  # all that the host needs of this step
        for _, tensors in scores:
            self._tensors += tensors
        self._host_copy = HostCopy(_pack(self._tensors) if scores else token_ids)

    def is_done(self) -> bool:
        """Whether `result` would not wait for the device. Raises any error of the device."""
        return self._host_copy.has_arrived()

    def result(self) -> StepResult:
        """Wait for the device, and return the chosen tokens by sequence, with scores. Raises any error of the
        device.
        """
        # 1. Wait for the device. No other code of a step should: the device would be idle meanwhile.
        if self.scores:
            token_ids, *arrays = _unpack(self._host_copy.read(), self._tensors)
        else:
            token_ids, arrays = self._host_copy.read(), []
        # 2. Split the tokens by sequence. In most steps each sequence has one.
        chosen, counts = token_ids.tolist(), self.batch.rows.chosen_counts
        if len(chosen) == len(counts) and all(counts):
            tokens = [[token_id] for token_id in chosen]
        else:
            tokens, row = [], 0
            for count in counts:
                tokens.append(chosen[row : row + count])
                row += count
        # 3. Give each score its own arrays, which are in the order of the scores.
        result = StepResult(tokens)
        start = 0
        for score, tensors in self.scores:
            end = start + len(tensors)
            result = score.add_to(result, self.batch, token_ids, arrays[start:end])
            start = end
        return result


class HostCopy:
    """A copy of a tensor to the host, which has been started. `read` waits for this copy only, and not for
    work that was queued later.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy of a tensor of any shape and dtype."""
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._numbers = host.numpy()  # shares the memory of `host`
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._numbers = tensor.numpy().copy()  # the next step may write the tensor itself

    def has_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> np.ndarray:
        """Wait for the copy, and return the tensor's numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of the tensors as one int32[n], so that one copy takes them to the host. Floating-point
    tensors are fp32, and are packed as their bits; other tensors are converted to int32.
    """
    device = tensors[0].device
    numbers = []
    for tensor in tensors:
        four_bytes = tensor if tensor.is_floating_point() else tensor.int()  # each number is fp32 or int32
        numbers.append(four_bytes.to(device).reshape(-1).view(torch.int32))
    return torch.cat(numbers)


def _unpack(numbers: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """Undo `_pack`: split numbers, an int32[n], into fp32 or int32 arrays of the shapes of `like`."""
    arrays, start = [], 0
    for tensor in like:
        part = numbers[start : start + tensor.numel()]
        dtype = np.float32 if tensor.is_floating_point() else np.int32
        arrays.append(part.view(dtype).reshape(tensor.shape))
        start += tensor.numel()
    return arrays
