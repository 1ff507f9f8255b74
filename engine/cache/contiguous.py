"""Attention of a step with one sequence, on a CPU: its pages as one contiguous tensor, for a varlen kernel.

A kernel that reads pages in place needs a plan of their blocks. Such a plan pays for many sequences, and not
for a single one. The varlen kernel gets exactly the sequence's own keys and values. New keys and values are
stored in the sequence's blocks, too, so that later steps can read the blocks. Part 12.
"""

from typing import NamedTuple

from torch import Tensor

from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.requests.batch import Batch

SPARE_BLOCKS = 16  # how many blocks a sequence can grow before its pages are gathered again


class _GatheredPages(NamedTuple):
    """A copy of one sequence's pages."""

    seq_id: str
    blocks: list[int]  # the n blocks that were gathered
    pages: Tensor  # [2, L, M, Hkv, Dh]: M = (n + SPARE_BLOCKS) · P tokens


class ContiguousPages:
    """Attends to one sequence, with its keys and values in one piece.

    If the blocks are neighbours, the piece is a view of the memory, and nothing is copied. Otherwise (after a
    shared beginning, for example) the blocks are gathered into a copy, to which each step adds its new
    tokens. There is at most one copy: that of the last sequence that needed one. The copy has room for
    SPARE_BLOCKS more blocks, and stays until `forget` or until another sequence needs a copy.

    Call `forget` whenever other code changes blocks: before each step of several sequences, and after each
    copy of blocks.
    """

    def __init__(self, memory: Tensor, kernel: VarlenKernel) -> None:
        """`memory`: [2, L, B, P, Hkv, Dh]."""
        self._memory, self._kernel = memory, kernel
        self._layers = memory.flatten(2, 3).flatten(0, 1)  # [2 · L, B · P, Hkv, Dh], a view
        self._gathered: _GatheredPages | None = None

    def forget(self) -> None:
        """Drop the copy: the blocks may have changed."""
        self._gathered = None

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of a step of one sequence, whose last T tokens are new."""
        T, context_len = batch.num_tokens, batch.context_lens[0]
        blocks = batch.tables[0].tolist()
        # 1. Get the pages in one piece: a view of the memory if the blocks are neighbours, otherwise a copy.
        new_tokens: list[tuple[Tensor, Tensor]] = []  # of a copy: (in a block, in the copy); none of a view
        are_neighbours = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        if are_neighbours:
            self.forget()  # this step stores in the blocks only, so a copy would miss its tokens
            first = blocks[0] * self._memory.shape[3]
            layers = self._layers[:, first : first + context_len]  # [2 · L, context_len, Hkv, Dh]
        else:
            pages = self._gathered_pages(batch.ids[0], blocks, context_len)
            layers = pages.flatten(0, 1)
            new_tokens = self._new_token_views(blocks, pages, context_len - T)
        # 2. Get each layer's keys and values. `layers` has the keys of L layers, then their values.
        by_layer = layers.unbind()  # 2 · L tensors [context_len, Hkv, Dh]
        new_by_layer = layers[:, -T:].unbind()  # 2 · L tensors [T, Hkv, Dh]
        L = len(by_layer) // 2
        keys, values = by_layer[:L], by_layer[L:]
        new_keys, new_values = new_by_layer[:L], new_by_layer[L:]
        spans = Spans.of_one(T, context_len)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Store, then attend. The last layer copies the new tokens of all layers into the blocks.
            new_keys[layer].copy_(k)
            new_values[layer].copy_(v)
            if layer == L - 1:
                for in_block, in_copy in new_tokens:
                    in_block.copy_(in_copy)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _gathered_pages(self, seq_id: str, blocks: list[int], context_len: int) -> Tensor:
        """A copy of a sequence's pages: [2, L, context_len, Hkv, Dh]. This is the last step's copy, or a new
        one if the last step's copy is of another sequence, of other blocks, or too short.
        """
        gathered = self._gathered
        if (
            gathered is None
            or gathered.seq_id != seq_id
            or gathered.pages.shape[2] < context_len
            or gathered.blocks != blocks[: len(gathered.blocks)]
        ):
            pages = self._memory[:, :, blocks].flatten(2, 3)  # [2, L, n · P, Hkv, Dh]
            num_tokens, spare = pages.shape[2], SPARE_BLOCKS * self._memory.shape[3]
            with_spare = pages.new_empty(*pages.shape[:2], num_tokens + spare, *pages.shape[3:])
            with_spare[:, :, :num_tokens] = pages
            gathered = self._gathered = _GatheredPages(seq_id, blocks, with_spare)
        return gathered.pages[:, :, :context_len]

    def _new_token_views(self, blocks: list[int], pages: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """For each block with tokens from position `start` on: a view of these n tokens in the block, and a
        view of them in `pages`. Both views are [2, L, n, Hkv, Dh].
        """
        P, context_len = self._memory.shape[3], pages.shape[2]
        num_blocks = -(-context_len // P)  # rounded up
        views: list[tuple[Tensor, Tensor]] = []
        for i in range(start // P, num_blocks):
            block_start = i * P  # the position of the block's first token
            first, end = max(start, block_start), min(context_len, block_start + P)
            in_block = self._memory[:, :, blocks[i], first - block_start : end - block_start]
            views.append((in_block, pages[:, :, first:end]))
        return views
