"""Memory in blocks of equal size, as an operating system has its pages: which are in use, and which are free.

Knows numbers alone: no tensors, no tokens, no sequences. Every call costs constant time per block it names.
Part 12. Source: Kwon et al., PagedAttention, SOSP 2023, https://arxiv.org/abs/2309.06180.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Contents(Protocol):
    """Which blocks hold something that can be found again, though no sequence refers to them (a
    prefix cache).
    """

    def __contains__(self, block: int) -> bool: ...
    def forget(self, block: int) -> None: ...


class NoContents:
    """For blocks without a prefix cache: nothing in them can be found."""

    def __contains__(self, block: int) -> bool:
        return False

    def forget(self, block: int) -> None:
        pass


class BlockManager:
    """Counts the references to each of `num_blocks` blocks. One that nobody refers to is free."""

    def __init__(self, num_blocks: int, contents: Contents | None = None) -> None:
        self.num_blocks = num_blocks
        self.contents = NoContents() if contents is None else contents  # an empty PrefixCache is false, too
        self.references = [0] * num_blocks
        # The free blocks in the order in which they are allocated. A block can leave from the middle.
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` free blocks, each with one reference; `after`: the block that they are to follow, if any.

        The next block is the one right behind the last, if that is free and its contents cannot be found: so
        blocks mostly follow one another, and no contents are lost for the sake of order. Else it is the front
        of the free queue, and its contents are forgotten. None: fewer are free, and nothing has changed.
        """
        if count > len(self.free_queue):
            return None
        blocks: list[int] = []
        next_block = -1 if after is None else after + 1
        for _ in range(count):
            in_order = next_block in self.free_queue and next_block not in self.contents
            block = next_block if in_order else next(iter(self.free_queue))
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
        references joins the free queue: at the end if its contents can be found, a sequence's last block
        first, so that a beginning, which more requests can share, is kept longest; else at the front.

        Raises ValueError for a block that is free already.
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
    """The blocks of one sequence, in order: with P tokens per block, token i lies at offset i % P in block
    i // P of the table. It grows at its end only.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(8, dtype=np.int64)  # longer than the table: doubled when it is full
        self._length = 0
        self.last: int | None = None  # the last block; None: the table is empty

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> np.ndarray:
        """[n]: their numbers. A view, until the table grows."""
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
