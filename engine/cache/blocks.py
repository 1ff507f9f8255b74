"""Counts which blocks of a paged memory are in use and which are free, as an operating system does for pages.

Knows block numbers only: no tensors, no tokens, no sequences. Every call takes constant time for each block
in its arguments or result. Part 12.
Source: Kwon et al., PagedAttention, SOSP 2023, https://arxiv.org/abs/2309.06180.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Contents(Protocol):
    """Finds blocks by their contents, as a prefix cache does. So a free block can still be of use."""

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found by its contents."""

    def forget(self, block: int) -> None:
        """The block will be overwritten, so it must not be found any more."""


class NoContents:
    """The `Contents` of blocks without a prefix cache: no block can be found."""

    def __contains__(self, block: int) -> bool:
        return False

    def forget(self, block: int) -> None:
        pass


class BlockManager:
    """Counts the references to each of `num_blocks` blocks. A block without references is free."""

    def __init__(self, num_blocks: int, contents: Contents | None = None) -> None:
        """All blocks are free. `contents` finds blocks by what they hold; None finds none."""
        self.num_blocks = num_blocks
        # Not `contents or NoContents()`: a prefix cache that is still empty is falsy, too.
        self.contents = NoContents() if contents is None else contents
        self.references = [0] * num_blocks
        # The free blocks, in the order in which they will be allocated. An OrderedDict, since `allocate` and
        # `fork` take blocks from the middle, and `free` puts some at the front (`move_to_end`).
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self.free_queue)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Allocate `count` free blocks, each with one reference. `after`: the sequence's last block.

        Each new block is the next number after the last block, if that block is free and cannot be found by
        its contents. So a sequence's blocks are mostly neighbours, and no contents are lost for this order.
        Otherwise the new block is the front of the free queue, and its contents are forgotten.

        Returns None, and changes nothing, if fewer than `count` blocks are free.
        """
        if count > len(self.free_queue):
            return None
        blocks: list[int] = []
        next_block = -1 if after is None else after + 1  # -1 is no block, so it is never free
        for _ in range(count):
            if next_block in self.free_queue and next_block not in self.contents:
                block = next_block
            else:
                block = next(iter(self.free_queue))  # the front of the queue
            del self.free_queue[block]
            self.contents.forget(block)
            self.references[block] = 1
            blocks.append(block)
            next_block = block + 1
        return blocks

    def fork(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, for another sequence. A free block leaves the free queue, and keeps
        its contents.
        """
        for block in blocks:
            if not self.references[block]:
                del self.free_queue[block]
            self.references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block; `blocks` are in the order of a sequence. A block without
        references joins the free queue: at the end if its contents can be found, at the front otherwise.
        The sequence's last block joins first. So a beginning, which more requests can share, is kept longest.

        Raises ValueError for a block that is free already. The blocks behind it in `blocks` are freed then.
        """
        for block in reversed(blocks):
            if not self.references[block]:
                raise ValueError(f"block {block} is free already")
            self.references[block] -= 1
            if not self.references[block]:
                self.free_queue[block] = None
                if block not in self.contents:
                    self.free_queue.move_to_end(block, last=False)


class BlockTable:
    """The blocks of one sequence, in order. With P tokens per block, token i lies at offset i % P in entry
    i // P of the table. A table grows at its end only.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(8, dtype=np.int64)  # has spare room, and is doubled when it is full
        self._length = 0
        self.last: int | None = None  # the last block; None if the table is empty

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> np.ndarray:
        """[n]: the block numbers, as a view that is valid until the table grows."""
        return self._numbers[: self._length]

    def append(self, blocks: Sequence[int]) -> None:
        """Add blocks at the end, in order."""
        end = self._length + len(blocks)
        if end > len(self._numbers):
            self._numbers = np.resize(self._numbers, max(end, 2 * len(self._numbers)))
        self._numbers[self._length : end] = blocks
        self._length = end
        if blocks:
            self.last = blocks[-1]
