"""Room in the CPU's memory for the keys and values of sequences that wait.

A preempted sequence has two ways back: its tokens are computed again, or its blocks were copied here and are
copied back. Promises that what comes back is what left. Part 12.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.blocks import BlockManager


class SwapSpace:
    """`num_blocks` blocks in the CPU's memory, of the same size as those of a cache's memory
    [2, L, B, P, Hkv, Dh].
    """

    def __init__(self, memory: Tensor, num_blocks: int) -> None:
        shape = (*memory.shape[:2], num_blocks, *memory.shape[3:])
        self.memory = torch.zeros(shape, dtype=memory.dtype, pin_memory=memory.is_cuda)
        self.blocks = BlockManager(num_blocks)
        self._away: dict[str, tuple[list[int], int]] = {}  # sequence -> its blocks here, its tokens

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._away

    def __len__(self) -> int:
        return len(self._away)

    def num_blocks_of(self, seq_id: str) -> int:
        return len(self._away[seq_id][0])

    def put(self, seq_id: str, memory: Tensor, blocks: Sequence[int], num_tokens: int) -> bool:
        """Copy a sequence's first `num_tokens` tokens, which lie in `blocks` of `memory`, here. False: there
        is no room, and nothing was copied.
        """
        own = self.blocks.allocate(len(blocks))
        if own is None:
            return False
        self.memory[:, :, own] = memory[:, :, _index(blocks, memory)].cpu()
        self._away[seq_id] = own, num_tokens
        return True

    def take(self, seq_id: str, memory: Tensor, blocks: Sequence[int]) -> int:
        """Copy a sequence back, into `blocks` of `memory`, and leave its room to others. How many tokens."""
        own, num_tokens = self._away.pop(seq_id)
        memory[:, :, _index(blocks, memory)] = self.memory[:, :, own].to(memory.device)
        self.blocks.free(own)
        return num_tokens

    def drop(self, seq_id: str) -> None:
        """The sequence will not come back. Does nothing for one that is not here."""
        if seq_id in self._away:
            self.blocks.free(self._away.pop(seq_id)[0])


def _index(blocks: Sequence[int], memory: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(blocks, dtype=np.int64)).to(memory.device)
