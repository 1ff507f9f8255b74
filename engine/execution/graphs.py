"""Decode steps as CUDA graphs: hundreds of kernels launched by one call. Part 13.

A step of a model with 48 layers launches some 300 kernels, each by Python, one after the other; with few
sequences the GPU waits for the host most of the time. A graph records them once, with their addresses and
numbers of rows, and replays them in one call. So everything that changes from step to step (tokens,
positions, where keys go, block tables, lengths) lies in buffers whose addresses never change, and there is a
graph for each size of a ladder: a step of 5 sequences runs in the graph for 8, and three rows are padding.

Promises the numbers of the model's forward pass up to rounding, and `sample`'s choice for greedy rows. Only
steps of few rows; others go another way. Without a GPU, or with `capture=False`, the same kernels run without
a graph. Document: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
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

# logits[S, at least V] = step(token_ids[S], positions[S], slots[S], tables[S, W], lens[S])
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
StepOf = Callable[[int], Step]  # the step that computes so many rows


class GraphInputs(NamedTuple):
    """What a graph of `size` rows reads: views of one array (on the host) or tensor (on the device)."""

    token_ids: Any  # [size]
    sources: Any  # [size]: the row of `LastTokens.chosen` that has the token; -1: it is in token_ids
    positions: Any  # [size]
    slots: Any  # [size]; -1: nothing is stored
    lens: Any  # [size]; 0: a padding row
    tables: Any  # [size, width]


PADDING = GraphInputs(token_ids=0, sources=-1, positions=0, slots=-1, lens=0, tables=0)
NUMBERS_PER_ROW = len(PADDING) - 1  # beside its block table


def ladder(max_rows: int) -> list[int]:
    """The numbers of rows there are graphs for: vLLM's 1, 2, 4, then multiples of 8, and `max_rows`."""
    return sorted({size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows} | {max_rows})


class ModelStep:
    """Any model's own forward pass, with our attention and store."""

    def __init__(self, model: LanguageModel, keys: list[Tensor], values: list[Tensor]) -> None:
        """keys and values by layer: [B, P, Hkv, Dh]."""
        self.model, self.keys, self.values = model, keys, values

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """Each [S], tables[S, W] -> logits[S, V]."""
        splits = num_splits(len(lens), self.model.config.num_kv_heads, lens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            store_kv(k, v, keys, values, slots)
            return paged_attention(q, keys, values, tables, lens, splits)

        return self.model.logits(self.model(token_ids, positions, attend))


def steps(
    model: LanguageModel, memory: PageMemory, max_rows: int, many_rows_class: type[ManyRows] = ManyRows
) -> StepOf:
    """How a step of so many rows is computed, up to `max_rows`: by the fastest way that fits the model.

    `many_rows_class`: computes several rows of GPT-2. (Part 16 has one whose rows may see one another; a row
    alone has no other to see.)
    """
    pages = list(memory.keys), list(memory.values)
    if not SingleRow.fits(model):
        step = ModelStep(model, *pages)
        return lambda rows: step
    single_row, many_rows = SingleRow(model, *pages), many_rows_class(model, *pages, max_rows)
    return lambda rows: single_row if rows == 1 else many_rows


class DecodeGraphs:
    """A graph for each size of the ladder, over the same buffers."""

    def __init__(
        self, step_of: StepOf, last: LastTokens, vocab_size: int, max_rows: int, width: int, capture: bool,
        in_flight: int = 2,
    ) -> None:  # fmt: skip
        """`width`: blocks of the longest sequence there may be. `in_flight`: how many calls may be submitted
        before the device begins the first.
        """
        device = last.chosen.device
        self.likeliest = torch.zeros(max_rows, dtype=torch.long, device=device)  # [max_rows]: the last call's
        self.step_of, self.width, self.sizes, self._last = step_of, width, ladder(max_rows), last
        numbers = max_rows * (NUMBERS_PER_ROW + width)
        # Several copies on the host: while the device reads one, the next step's numbers go into another.
        pinned = device.type == "cuda"
        self._host = [torch.zeros(numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(in_flight)]
        self._host_index = 0
        self._device_numbers = torch.zeros(numbers, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._greedy = Greedy(vocab_size, max_rows, device)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}  # replay, and where its logits are
        if capture:
            self._capture()

    def __call__(self, batch: Batch) -> Tensor:
        """logits[T, at least V], a row for each new token, until the next call; the likeliest are in
        `likeliest`[T]. A step that stores after it attends takes one new token of each sequence, no more.
        """
        T = batch.num_tokens
        size = next(size for size in self.sizes if size >= T)
        # 1. The step's numbers, on the host: rows beyond T are padding.
        self._host_index = (self._host_index + 1) % len(self._host)
        host = self._host[self._host_index]
        inputs = self._views(host.numpy(), size)
        positions, tables = np.array(batch.positions), batch.tables
        if len(batch.ids) != T:  # a row for each token: as if it were a sequence that ends with it
            tables = np.repeat(tables, np.diff(batch.query_start), axis=0)  # [T, W]
        inputs.token_ids[:T], inputs.sources[:T] = batch.token_ids, self._last.sources(batch)
        inputs.positions[:T], inputs.slots[:T], inputs.lens[:T] = positions, batch.slots, positions + 1
        for numbers, padding in zip(inputs[:NUMBERS_PER_ROW], PADDING, strict=False):
            numbers[T:] = padding
        inputs.tables[:T, : tables.shape[1]] = tables  # a padding row's is not read
        # 2. One copy, one call.
        count = size * (NUMBERS_PER_ROW + self.width)
        self._device_numbers[:count].copy_(host[:count], non_blocking=True)
        if size in self._graphs:
            replay, logits = self._graphs[size]
            replay()
        else:
            logits = self._run(size)
        return logits[:T]

    def _views(self, numbers: Any, size: int) -> GraphInputs:
        """The inputs of `size` rows, as views of `numbers`: end to end from its start."""
        tables_start, end = NUMBERS_PER_ROW * size, (NUMBERS_PER_ROW + self.width) * size
        token_ids, sources, positions, slots, lens = numbers[:tables_start].reshape(NUMBERS_PER_ROW, size)
        tables = numbers[tables_start:end].reshape(size, self.width)
        return GraphInputs(token_ids, sources, positions, slots, lens, tables)

    def _run(self, size: int) -> Tensor:
        """What a graph records: logits[size, at least V], and the likeliest tokens."""
        inputs, token_ids = self._views(self._device_numbers, size), self._token_ids[:size]
        fetch(inputs.token_ids, inputs.sources, self._last.chosen, token_ids)
        step = self.step_of(size)
        logits = step(token_ids, inputs.positions, inputs.slots, inputs.tables, inputs.lens)
        self._greedy(logits, self.likeliest)
        return logits

    @torch.inference_mode()
    def _capture(self) -> None:
        """Record a graph for each size. The largest first: the others find room in its memory."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self.sizes):
            for numbers, padding in zip(self._views(self._device_numbers, size), PADDING, strict=True):
                numbers.fill_(padding)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(size)  # kernels are compiled before they are recorded
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = self._run(size)
            self._graphs[size] = graph.replay, logits


class GraphWay:
    """Computes a step by a graph, if it has few rows and no prompt is scored."""

    def __init__(self, graphs: DecodeGraphs, vocab_size: int, max_new: int = 1) -> None:
        """`max_new`: a step in which a sequence has more new tokens does not fit. More than 1 only if the
        rows of `graphs` see one another (Part 16).
        """
        self.graphs, self._V, self._max_new = graphs, vocab_size, max_new

    def fits(self, batch: Batch) -> bool:
        """Few rows, few new tokens of each sequence, and no row of a prompt to score."""
        if batch.num_tokens > self.graphs.sizes[-1] or batch.rows.prompt:
            return False
        starts = batch.query_start
        return batch.num_tokens == len(batch.ids) or all(b - a <= self._max_new for a, b in pairwise(starts))

    def __call__(self, batch: Batch) -> Logits:
        logits, rows = self.graphs(batch)[:, : self._V], batch.rows.chosen  # [T, V]
        if len(rows) == len(logits):
            return Logits(logits, likeliest=self.graphs.likeliest[: len(rows)])
        (chosen,) = on_device(logits.device, rows)  # [R]
        return Logits(logits[chosen], likeliest=self.graphs.likeliest[chosen])
