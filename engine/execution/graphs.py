"""Decode steps as CUDA graphs: hundreds of kernels launched by one call. Part 13.

A step of a GPT-2 with 48 layers launches some 580 kernels from Python, one after the other; with the kernels
that are tuned for one sequence, 240. With few sequences, the GPU waits for the host most of the time. A graph
records the kernels once, with their addresses and numbers of rows, and replays all of them in one call. So
everything that changes from step to step (tokens, positions, slots, block tables, lengths) lies in buffers
whose addresses never change, and each size of a ladder has its own graph: a step of 5 sequences runs in the
graph for 8, with three rows of padding.

The results are those of the model's forward pass up to rounding, and greedy rows choose as `sample` does.
Graphs compute steps of few rows only; other steps go another way. With `capture=False`, the same kernels run
without a graph.
Document: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import Logits
from engine.kernels.greedy import Greedy, fetch
from engine.kernels.many_rows import ManyRows
from engine.kernels.paged_attention import num_splits, paged_attention
from engine.kernels.single_row import SingleRow
from engine.kernels.store_kv import store_kv
from engine.machine.device import on_device
from engine.models.language_model import LanguageModel
from engine.requests.batch import Batch

# In this module, a step is a forward pass of S rows, which a graph can record: logits[S, at least V] =
# step(token_ids[S], positions[S], slots[S], tables[S, W], lens[S]).
RowsStep = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
StepOf = Callable[[int], RowsStep]  # a number of rows -> the step that computes so many


class GraphInputs(NamedTuple):
    """What a graph of `size` rows reads: views of one array (on the host) or tensor (on the device)."""

    token_ids: Any  # [size]
    sources: Any  # [size]: the row of `LastTokens.chosen` with the token; -1 if the token is in token_ids
    positions: Any  # [size]
    slots: Any  # [size]; -1 stores nothing
    lens: Any  # [size]: tokens that the row attends to; 0 for a padding row
    tables: Any  # [size, width]; that of a padding row is not read

    def pad(self, first: int) -> None:
        """Make padding rows of all rows from `first` on."""
        self.token_ids[first:] = 0
        self.sources[first:] = -1
        self.positions[first:] = 0
        self.slots[first:] = -1
        self.lens[first:] = 0


NUMBERS_PER_ROW = 5  # the fields of GraphInputs for one row, without its block table


class CapturedGraph(NamedTuple):
    """A graph of one size."""

    replay: Callable[[], None]
    logits: Tensor  # [size, at least V]: where `replay` writes


def ladder(max_rows: int) -> list[int]:
    """The sizes of graphs, in rows, ascending: vLLM's 1, 2, 4, then multiples of 8, and `max_rows` last."""
    smaller = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*smaller, max_rows]


class ModelStep:
    """The forward pass of any model, with our kernels for attention and for storing keys and values."""

    def __init__(self, model: LanguageModel, keys: list[Tensor], values: list[Tensor]) -> None:
        """`keys` and `values` have a tensor [B, P, Hkv, Dh] for each layer."""
        self.model, self.keys, self.values = model, keys, values

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """tables[S, W], each other argument [S] -> logits[S, V]."""
        splits = num_splits(len(lens), self.model.config.num_kv_heads, lens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            store_kv(k, v, keys, values, slots)
            return paged_attention(q, keys, values, tables, lens, splits)

        return self.model.logits(self.model(token_ids, positions, attend))


def fastest_steps(
    model: LanguageModel, memory: PageMemory, max_rows: int, many_rows_class: type[ManyRows] = ManyRows
) -> StepOf:
    """A function that gives the fastest step for a number of rows from 1 to `max_rows`. For `DecodeGraphs`.

    `many_rows_class` computes steps of several rows of GPT-2. Part 16 passes a class whose rows may see one
    another. A single row has no other row to see, so `SingleRow` computes it for any such class.
    """
    keys, values = list(memory.keys), list(memory.values)
    if not SingleRow.fits(model):
        step = ModelStep(model, keys, values)
        return lambda rows: step
    single_row = SingleRow(model, keys, values)
    many_rows = many_rows_class(model, keys, values, max_rows)
    return lambda rows: single_row if rows == 1 else many_rows


class DecodeGraphs:
    """Computes decode steps by graphs: one for each size of the ladder, all over the same buffers."""

    def __init__(
        self,
        step_of: StepOf,
        last_tokens: LastTokens,
        vocab_size: int,
        max_rows: int,
        width: int,
        capture: bool,
        in_flight: int = 2,
    ) -> None:
        """`vocab_size` is 0 if the step gives no logits: `likeliest` is not set then (Extension A). `width`
        is the number of blocks of the longest possible sequence. `capture` records graphs, which needs a GPU.
        `in_flight` is how many calls may be submitted before the device has copied the first one's numbers.
        """
        device = last_tokens.chosen.device
        self.likeliest = torch.zeros(max_rows, dtype=torch.long, device=device)  # [max_rows]: the last call's
        self.step_of, self.width, self.sizes = step_of, width, ladder(max_rows)
        self._last_tokens = last_tokens
        numbers = max_rows * (NUMBERS_PER_ROW + width)
        # Several buffers on the host: while the device reads one, the next step's numbers go into another.
        pinned = device.type == "cuda"
        self._host = [torch.zeros(numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(in_flight)]
        self._host_index = 0
        self._device_numbers = torch.zeros(numbers, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._greedy = Greedy(vocab_size, max_rows, device) if vocab_size else None
        self._graphs: dict[int, CapturedGraph] = {}  # by size
        if capture:
            self._capture()

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a step of T ≤ max_rows new tokens. Returns logits[T, at least V], a row for each token, and
        sets `likeliest`[:T] to the likeliest token of each row, if the step gives logits. The next call
        overwrites both. A sequence may have several new tokens only if the step stores the keys of all of
        them before any row attends.
        """
        T = batch.num_tokens
        size = next(size for size in self.sizes if size >= T)
        # 1. The step's numbers, on the host. Rows beyond T are padding.
        self._host_index = (self._host_index + 1) % len(self._host)
        host = self._host[self._host_index]
        inputs = self._views(host.numpy(), size)
        positions, tables = np.array(batch.positions), batch.tables
        if len(batch.ids) != T:  # each token gets a row, as if the token were the last of its own sequence
            tables = np.repeat(tables, np.diff(batch.query_start), axis=0)  # [T, W]
        inputs.token_ids[:T] = batch.token_ids
        inputs.sources[:T] = self._last_tokens.sources(batch)
        inputs.positions[:T] = positions
        inputs.slots[:T] = batch.slots
        inputs.lens[:T] = positions + 1
        inputs.tables[:T, : tables.shape[1]] = tables
        inputs.pad(T)
        # 2. One copy, one call.
        count = size * (NUMBERS_PER_ROW + self.width)
        self._device_numbers[:count].copy_(host[:count], non_blocking=True)
        if size in self._graphs:
            graph = self._graphs[size]
            graph.replay()
            logits = graph.logits
        else:
            logits = self._run(size)
        return logits[:T]

    def _views(self, numbers: Any, size: int) -> GraphInputs:
        """The inputs of `size` rows, as views that lie end to end from the start of `numbers`[n]."""
        tables_start, end = NUMBERS_PER_ROW * size, (NUMBERS_PER_ROW + self.width) * size
        token_ids, sources, positions, slots, lens = numbers[:tables_start].reshape(NUMBERS_PER_ROW, size)
        tables = numbers[tables_start:end].reshape(size, self.width)
        return GraphInputs(token_ids, sources, positions, slots, lens, tables)

    def _run(self, size: int) -> Tensor:
        """Compute `size` rows of the buffers; a graph records this. Returns logits[size, at least V], and
        sets `likeliest`[:size].
        """
        inputs, token_ids = self._views(self._device_numbers, size), self._token_ids[:size]
        fetch(inputs.token_ids, inputs.sources, self._last_tokens.chosen, token_ids)
        step = self.step_of(size)
        logits = step(token_ids, inputs.positions, inputs.slots, inputs.tables, inputs.lens)
        if self._greedy is not None:
            self._greedy(logits, self.likeliest)
        return logits

    @torch.inference_mode()
    def _capture(self) -> None:
        """Record a graph for each size, the largest first: the other graphs then fit into its memory."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self.sizes):
            self._device_numbers.zero_()
            self._views(self._device_numbers, size).pad(first=0)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(size)  # compiles the kernels, which cannot be done while they are recorded
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's thread may ask the device about earlier sums in the meantime (Extension A).
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = self._run(size)
            self._graphs[size] = CapturedGraph(graph.replay, logits)


class GraphWay:
    """A `Way` that computes a step by a graph, if the step has few rows and scores no prompt."""

    def __init__(self, graphs: DecodeGraphs, vocab_size: int, max_new: int = 1) -> None:
        """`vocab_size` is the number of logits of a row; what a step gives beyond them is padding. `max_new`
        is the most new tokens of a sequence. More than 1 needs a step that stores the keys of all new tokens
        before any row attends (Part 16).
        """
        self.graphs, self._vocab_size, self._max_new = graphs, vocab_size, max_new

    def fits(self, batch: Batch) -> bool:
        """Whether the step has few rows, few new tokens of each sequence, and no row of a prompt to score."""
        if batch.num_tokens > self.graphs.sizes[-1] or batch.rows.prompt_rows:
            return False
        if batch.num_tokens == len(batch.ids):  # one new token each
            return True
        return all(end - start <= self._max_new for start, end in pairwise(batch.query_start))

    def __call__(self, batch: Batch) -> Logits:
        """Replay a graph. The next call may overwrite these logits."""
        logits = self.graphs(batch)[:, : self._vocab_size]  # [T, V]
        rows = batch.rows.chosen
        if len(rows) == len(logits):
            return Logits(logits, likeliest=self.graphs.likeliest[: len(rows)])
        (chosen,) = on_device(logits.device, rows)  # [R]
        return Logits(logits[chosen], likeliest=self.graphs.likeliest[chosen])
