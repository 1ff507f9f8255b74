"""A sequence alone in a step, on a CPU: its pages in one piece, for an ordinary kernel.

Reading pages where they lie needs a plan of where that is, which pays for many sequences and not for one.
Promises that the kernel gets exactly the sequence's own keys and values, and that the pages hold them, too:
whoever else reads the pages later finds what belongs there. Part 12.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.requests.batch import Batch

ROOM = 16  # blocks that a copy has room for beyond its sequence's own; then it is made anew


class _Copy(NamedTuple):
    """A sequence's pages, copied together."""

    id: str
    table: np.ndarray  # the blocks it was made of
    piece: Tensor  # [2, L, M, Hkv, Dh], M more than the sequence's tokens


class Alone:
    """Where blocks follow one another, the piece is a view of the memory, and nothing is copied.

    Elsewhere (behind a beginning that is shared, say) it is a copy, made once, to which each step adds its
    new tokens. What other steps store, or copies of blocks change, is not in it: then `forget` is called. So
    it stays until the next step that is not its sequence's own: a record of steps does not say who has ended.
    """

    def __init__(self, memory: Tensor, kernel: VarlenKernel) -> None:
        """`memory`: [2, L, B, P, Hkv, Dh]."""
        self._memory, self._kernel = memory, kernel
        self._rows = memory.flatten(2, 3).flatten(0, 1)  # [2 · L, B · P, Hkv, Dh], a view
        self._copy: _Copy | None = None

    def forget(self) -> None:
        self._copy = None

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of a step of one sequence: T new tokens, `end` in all."""
        table, T, end = batch.tables[0], batch.num_tokens, batch.context_lens[0]
        # 1. The piece, and where its new tokens lie in blocks, if it is a copy of them.
        is_run = bool((table[1:] - table[:-1] == 1).all())
        if is_run:
            self.forget()
            first, blocks = int(table[0]) * self._memory.shape[3], []
            layers = self._rows[:, first : first + end].unbind()
        else:
            piece = self._copied(batch.ids[0], table, end)
            layers, blocks = piece.flatten(0, 1).unbind(), self._new_in_blocks(table, piece, end - T)
        L = len(layers) // 2
        keys, values = layers[:L], layers[L:]  # [end, Hkv, Dh] each
        spans, last = Spans.of_one(T, end), L - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # 2. Store, then look. The blocks get what is new of all layers behind the last one.
            keys[layer][-T:].copy_(k)
            values[layer][-T:].copy_(v)
            if layer == last:
                for block, new in blocks:
                    block.copy_(new)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _copied(self, seq_id: str, table: np.ndarray, end: int) -> Tensor:
        """[2, L, end, Hkv, Dh]"""
        copy = self._copy
        if (
            copy is None
            or copy.id != seq_id
            or copy.piece.shape[2] < end
            or not np.array_equal(copy.table, table[: len(copy.table)])
        ):
            pages = self._memory[:, :, torch.from_numpy(table)].flatten(2, 3)  # [2, L, n · P, Hkv, Dh]
            P = self._memory.shape[3]
            room = pages.new_empty(*pages.shape[:2], pages.shape[2] + ROOM * P, *pages.shape[3:])
            room[:, :, : pages.shape[2]] = pages
            copy = self._copy = _Copy(seq_id, table, room)
        return copy.piece[:, :, :end]

    def _new_in_blocks(self, table: np.ndarray, piece: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """For each block that the tokens from `start` on touch: its part for them, and theirs of the piece,
        [2, L, n, Hkv, Dh] each.
        """
        P, end, blocks = self._memory.shape[3], piece.shape[2], []
        for i in range(start // P, -(-end // P)):
            a, b = max(start, i * P), min(end, (i + 1) * P)
            in_block = self._memory[:, :, int(table[i]), a - i * P : b - i * P]
            blocks.append((in_block, piece[:, :, a:b]))
        return blocks
