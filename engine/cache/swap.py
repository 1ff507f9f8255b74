"""Room in the CPU's memory for the keys and values of sequences that wait.

A preempted sequence has two ways back: its tokens are computed again, or its blocks were copied here and are
copied back. Promises that what is here is nobody else's. Knows numbers alone: the cache's memory holds the
keys. Part 12.
"""

from dataclasses import dataclass

from engine.cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class Away:
    """A sequence that waits here."""

    blocks: list[int]  # of the swap space
    num_tokens: int
    drafted: int  # of these, the first that a draft model has read, too (Part 16)


class SwapSpace:
    """`num_blocks` blocks in the CPU's memory, of the same size as those of the cache."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self._away: dict[str, Away] = {}  # by sequence

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._away

    def __len__(self) -> int:
        return len(self._away)

    def put(self, seq_id: str, num_blocks: int, num_tokens: int, drafted: int = 0) -> Away | None:
        """Room for a sequence's blocks, which hold its first `num_tokens` tokens. None: there is none."""
        blocks = self.blocks.allocate(num_blocks)
        if blocks is None:
            return None
        self._away[seq_id] = Away(blocks, num_tokens, drafted)
        return self._away[seq_id]

    def take(self, seq_id: str) -> Away:
        """A sequence goes back, and leaves its room to others, whose copies come behind its own."""
        away = self._away.pop(seq_id)
        self.blocks.free(away.blocks)
        return away

    def num_blocks_of(self, seq_id: str) -> int:
        return len(self._away[seq_id].blocks)

    def drop(self, seq_id: str) -> None:
        """The sequence will not come back. Does nothing for one that is not here."""
        if seq_id in self._away:
            self.take(seq_id)
