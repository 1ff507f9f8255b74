"""Attention of a step with one sequence, on a CPU: its pages as one contiguous tensor, for a varlen kernel.

To read pages where they lie takes a plan of their places, which pays for many sequences and not for one.
Promises that the kernel gets exactly the sequence's own keys and values, and that they are stored in its
blocks, too: a later step that reads the blocks finds them there. Part 12.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.requests.batch import Batch

SPARE_BLOCKS = 16  # that a copy is longer than its sequence: it lasts so many blocks before it is made anew


class _GatheredPages(NamedTuple):
    """A copy of one sequence's pages."""

    seq_id: str
    table: np.ndarray  # [n]: the blocks it was made of
    pages: Tensor  # [2, L, M, Hkv, Dh]: M = (n + SPARE_BLOCKS) · P tokens


class ContiguousPages:
    """Where a sequence's blocks follow one another, they are read as a view of the memory: nothing is copied.

    Elsewhere (behind a shared beginning, say) they are gathered into a copy, to which each step adds its new
    tokens. There is at most one copy, that of the last sequence which needed one: as many bytes as the blocks
    of this sequence and SPARE_BLOCKS more have. It is replaced when another sequence needs one, and let go by
    `forget`, which must be called for each step of several sequences and each copy of blocks, since they
    change blocks and not the copy. A sequence that ends leaves it there until one of these comes.
    """

    def __init__(self, memory: Tensor, kernel: VarlenKernel) -> None:
        """`memory`: [2, L, B, P, Hkv, Dh]."""
        self._memory, self._kernel = memory, kernel
        self._layers = memory.flatten(2, 3).flatten(0, 1)  # [2 · L, B · P, Hkv, Dh], a view
        self._gathered: _GatheredPages | None = None

    def forget(self) -> None:
        """Let the copy go: the blocks may have changed."""
        self._gathered = None

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of a step of one sequence: T new tokens, `end` in all."""
        table, T, end = batch.tables[0], batch.num_tokens, batch.context_lens[0]
        # 1. The pages in one piece; and if that is a copy, where its new tokens lie in the blocks.
        in_order = bool((table[1:] - table[:-1] == 1).all())
        if in_order:
            self.forget()  # what this step stores is not in the copy
            first, stores = int(table[0]) * self._memory.shape[3], []
            layers = self._layers[:, first : first + end].unbind()
        else:
            pages = self._copy(batch.ids[0], table, end)
            layers, stores = pages.flatten(0, 1).unbind(), self._stores(table, pages, end - T)
        L = len(layers) // 2
        keys, values = layers[:L], layers[L:]  # by layer: [end, Hkv, Dh]
        spans, last_layer = Spans.of_one(T, end), L - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # 2. Store, then attend. The last layer stores the new tokens of all layers in the blocks.
            keys[layer][-T:].copy_(k)
            values[layer][-T:].copy_(v)
            if layer == last_layer:
                for in_block, new in stores:
                    in_block.copy_(new)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _copy(self, seq_id: str, table: np.ndarray, end: int) -> Tensor:
        """[2, L, end, Hkv, Dh], of any blocks: the copy of the last step, if it serves, or a new one."""
        gathered = self._gathered
        if (
            gathered is None
            or gathered.seq_id != seq_id
            or gathered.pages.shape[2] < end
            or not np.array_equal(gathered.table, table[: len(gathered.table)])
        ):
            pages = self._memory[:, :, torch.from_numpy(table)].flatten(2, 3)  # [2, L, n · P, Hkv, Dh]
            num_tokens, spare = pages.shape[2], SPARE_BLOCKS * self._memory.shape[3]
            longer = pages.new_empty(*pages.shape[:2], num_tokens + spare, *pages.shape[3:])
            longer[:, :, :num_tokens] = pages
            gathered = self._gathered = _GatheredPages(seq_id, table, longer)
        return gathered.pages[:, :, :end]

    def _stores(self, table: np.ndarray, pages: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """For each block that has tokens from `start` on: where they lie in the block, and in `pages`;
        [2, L, n, Hkv, Dh] both.
        """
        P, end = self._memory.shape[3], pages.shape[2]
        stores: list[tuple[Tensor, Tensor]] = []
        for i in range(start // P, -(-end // P)):
            first, last = max(start, i * P), min(end, (i + 1) * P)
            in_block = self._memory[:, :, int(table[i]), first - i * P : last - i * P]
            stores.append((in_block, pages[:, :, first:last]))
        return stores
