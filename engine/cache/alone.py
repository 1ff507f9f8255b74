"""A sequence alone in a step, on a CPU: its pages in one piece, for an ordinary kernel.

Reading pages where they lie needs a plan of where that is, which pays for many sequences and not for one.
Promises that the kernel gets exactly the sequence's own keys and values, and that the pages hold them, too:
whoever else reads the pages later finds what belongs there. Part 12.
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.cache.blocks import BlockTable

ROOM = 16  # blocks that a copy has room for beyond its sequence's own; then it is made anew


class Alone:
    """Where blocks follow one another, the piece is a view of the memory, and nothing is copied.

    Elsewhere (behind a beginning that is shared, say) it is a copy, made once, to which each step adds its
    new tokens. What a step with other sequences stores is not in it: such a step calls `forget`.
    """

    def __init__(self, memory: Tensor, kernel: VarlenKernel) -> None:
        """`memory`: [2, L, B, P, Hkv, Dh]."""
        self._memory, self._kernel = memory, kernel
        self._copy: tuple[BlockTable, Tensor] | None = None  # whose, and [2, L, room, Hkv, Dh]

    def forget(self) -> None:
        self._copy = None

    def attention(self, table: BlockTable, T: int, end: int) -> Attend:
        """The `attend` of a step for one sequence of `end` tokens, the last T of which are new."""
        # 1. The piece, and where its new tokens lie in blocks, if it is a copy of them.
        piece = self._piece(table, end)
        keys, values = (layers.unbind() for layers in piece)  # by layer: [end, Hkv, Dh]
        blocks = [] if table.is_run else self._new_in_blocks(table, piece, end - T)
        spans, last = Spans.of_one(T, end), len(keys) - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # 2. Store, then look. The blocks get what is new of all layers behind the last one.
            keys[layer][-T:].copy_(k)
            values[layer][-T:].copy_(v)
            if layer == last:
                for block, new in blocks:
                    block.copy_(new)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _piece(self, table: BlockTable, end: int) -> Tensor:
        """[2, L, end, Hkv, Dh]"""
        if table.is_run:
            first = int(table.blocks[0]) * self._memory.shape[3]
            return self._memory.flatten(2, 3)[:, :, first : first + end]
        if self._copy is None or self._copy[0] is not table or self._copy[1].shape[2] < end:
            blocks = np.append(table.blocks, [table.last] * ROOM)  # what they hold is written over
            self._copy = table, self._memory[:, :, torch.from_numpy(blocks)].flatten(2, 3)
        return self._copy[1][:, :, :end]

    def _new_in_blocks(self, table: BlockTable, piece: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """For each block that the tokens from `start` on touch: its part for them, and theirs of the piece,
        [2, L, n, Hkv, Dh] each.
        """
        P, end, blocks = self._memory.shape[3], piece.shape[2], []
        for i in range(start // P, -(-end // P)):
            a, b = max(start, i * P), min(end, (i + 1) * P)
            own = self._memory[:, :, int(table.blocks[i]), a - i * P : b - i * P]
            blocks.append((own, piece[:, :, a:b]))
        return blocks
