"""The memory of a KV cache in pages: blocks of P tokens in one tensor, and a swap space in the host's memory.

Promises the same attention as slots (Part 7), whatever blocks a sequence has. Makes each copy of blocks once.
The kernels are arguments: a varlen kernel, plans by which tokens read pages (engine/attention/paged.py), and
a function that stores keys and values. This module knows only the record of a step: engine/cache/paged.py
decides which blocks a sequence has. Part 12.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.attention.paged import (
    MakeDecodePlan,
    MakePrefillPlan,
    Pages,
    Store,
    gather,
    paged_decode,
    store_by_index,
)
from engine.attention.slot_decode import combined_attend
from engine.cache.contiguous import ContiguousPages
from engine.cache.paged import PagedCache
from engine.machine.device import on_device
from engine.models.config import ModelConfig
from engine.requests.batch import Batch, Copy

MAX_ROW_BY_ROW = 8  # new tokens of a sequence; on a CPU, with more, a call of the varlen kernel is faster


class PageMemory:
    """`num_blocks` blocks of `block_size` tokens on the device, and `num_swap_blocks` on the host."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: VarlenKernel = dense_attention,
        decode: MakeDecodePlan = paged_decode,
        prefill: MakePrefillPlan | None = None,
        store: Store = store_by_index,
        num_swap_blocks: int = 0,
    ) -> None:
        """`decode` makes plans by which single tokens read pages, and `prefill` those for sequences with
        several new tokens. If `prefill` is None, `kernel` gets keys and values that are gathered from their
        pages. `store` writes new keys and values into pages.
        """
        self.num_blocks, self.block_size, self.num_swap_blocks = num_blocks, block_size, num_swap_blocks
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)  # [2, L, B, P, Hkv, Dh]
        swap_shape = (*shape[:2], num_swap_blocks, *shape[3:])
        self.swapped = torch.zeros(swap_shape, dtype=dtype, pin_memory=self.memory.is_cuda)
        keys, values = self.memory.unbind()  # [L, B, P, Hkv, Dh] each
        self.keys, self.values = keys.unbind(), values.unbind()  # by layer: [B, P, Hkv, Dh]
        self._num_heads, self._kernel = config.num_heads, kernel
        self._decode, self._prefill, self._store = decode, prefill, store
        # On a CPU without `prefill`, a plan of blocks does not pay for a single sequence (contiguous.py), and
        # a few new tokens, row by row, cost less than gathering their sequence's keys for the varlen kernel.
        self._single_is_contiguous = prefill is None and not self.memory.is_cuda
        # The most new tokens of a sequence that is attended row by row.
        self._max_by_row = MAX_ROW_BY_ROW if self._single_is_contiguous else 1
        self._contiguous = ContiguousPages(self.memory, kernel)
        self._num_copies = 0  # how many of the plan's copies are made; the plan numbers them from 0

    def plan(self, **options) -> PagedCache:
        """A new plan of these blocks, in which all are free. `options` are those of `PagedCache`."""
        self._num_copies = 0  # a new plan numbers its copies from 0
        return PagedCache(self.num_blocks, self.block_size, self.num_swap_blocks, **options)

    def apply(self, copies: Sequence[Copy]) -> None:
        """Make a step's copies, in order. After a step has failed, the next step has its copies again, and
        those that were made already are left out.
        """
        for copy in copies:
            if copy.number >= self._num_copies:
                self.move(copy)
                self._num_copies = copy.number + 1
                self._contiguous.forget()

    def move(self, copy: Copy) -> None:
        """Copy blocks, in all layers: within the device's memory, out to the host's memory, or back in."""
        source = self.swapped if copy.kind == "in" else self.memory
        target = self.swapped if copy.kind == "out" else self.memory
        (source_blocks,) = on_device(source.device, copy.source)
        (target_blocks,) = on_device(target.device, copy.target)
        blocks = source[:, :, source_blocks]  # [2, L, n, P, Hkv, Dh]
        target[:, :, target_blocks] = blocks.to(target.device)

    def pages(self, batch: Batch) -> Pages:
        """Where the batch's sequences lie."""
        return Pages(batch.tables, np.array(batch.context_lens), self.block_size)

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step. All that is the same in every layer is computed here, once.

        On a CPU without `prefill`, a single sequence goes to the varlen kernel in one piece. Otherwise all
        new keys and values are stored by their slots (block · P + offset in the block), and then each group
        of sequences (`_groups`) is attended in one call.
        """
        if len(batch.ids) == 1 and self._single_is_contiguous:
            return self._contiguous.attention(batch)
        self._contiguous.forget()
        (slots,) = on_device(self.memory.device, batch.slots)
        attend_groups = combined_attend(self._groups(batch))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(k, v, self.keys[layer], self.values[layer], slots)
            return attend_groups(layer, q, k, v)

        return attend

    def _groups(self, batch: Batch) -> list[tuple[slice | Tensor, Attend]]:
        """The groups of a step: which of its T rows each has, and how these are attended, in one call.

        1. Sequences with one new token (on a CPU without `prefill`: with up to MAX_ROW_BY_ROW). A plan of
           `decode` attends them row by row: each new token is a row that sees the tokens up to itself.
        2. All other sequences. `_attend_sequences` attends them.
        """
        pages = self.pages(batch)
        num_new = np.diff(batch.query_start)  # [S]: each sequence's new tokens
        is_by_row = num_new <= self._max_by_row  # [S]: whether a sequence is attended row by row
        sequence = np.repeat(np.arange(len(num_new)), num_new)  # [T]: the sequence of each row
        positions = np.array(batch.positions)  # [T]: the position of each row
        row_mask = is_by_row[sequence]  # [T]: whether a row's sequence is attended row by row
        groups: list[tuple[slice | Tensor, Attend]] = []
        if is_by_row.any():
            row_pages = Pages(pages.tables[sequence[row_mask]], positions[row_mask] + 1, self.block_size)
            plan = self._decode(row_pages, self._num_heads, self.keys[0])
            rows = self._index(row_mask)
            groups.append((rows, lambda layer, q, k, v: plan(q, self.keys[layer], self.values[layer])))
        if not is_by_row.all():
            attend_others = self._attend_sequences(pages.select(~is_by_row), num_new[~is_by_row])
            groups.append((self._index(~row_mask), attend_others))
        return groups

    def _index(self, mask: np.ndarray) -> slice | Tensor:
        """An index of the rows of a step for which mask[T] is true, of which there is at least one.

        It is a slice if the rows are neighbours, since indexing with a slice copies nothing. Otherwise it is
        a tensor of their indices, on the device.
        """
        rows = np.flatnonzero(mask)
        are_neighbours = rows[-1] - rows[0] + 1 == len(rows)
        if are_neighbours:
            return slice(int(rows[0]), int(rows[-1]) + 1)
        (index,) = on_device(self.memory.device, rows)
        return index

    def _attend_sequences(self, pages: Pages, num_new: np.ndarray) -> Attend:
        """Attention of S sequences, each with several new tokens: num_new[S]. If all of them are prompts that
        are computed from their start, the varlen kernel gets the new keys alone. Otherwise `prefill` reads
        the pages, or without it the varlen kernel gets keys that are gathered from them.
        """
        query_start = (0, *np.cumsum(num_new).tolist())
        if (num_new == pages.lens).all():  # they see new keys only
            spans = Spans(query_start, query_start)
            return lambda layer, q, k, v: self._kernel(q, k, v, spans)
        if self._prefill is not None:
            plan = self._prefill(pages, query_start, self.keys[0])
            return lambda layer, q, k, v: plan(q, self.keys[layer], self.values[layer])
        spans = Spans(query_start, (0, *np.cumsum(pages.lens).tolist()))
        (places,) = on_device(self.memory.device, pages.all_places())

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = gather(self.keys[layer], places), gather(self.values[layer], places)
            return self._kernel(q, keys, values, spans)

        return attend
