"""Swap space: blocks in the CPU's memory for the keys and values of preempted sequences.

A preempted sequence has two ways back: its tokens are computed again, or its blocks were copied to the swap
space and are copied back. This is the plan alone, block numbers: engine/cache/memory.py has the memory.
Promises that no two sequences here have a block in common. Part 12.
"""

from dataclasses import dataclass

from engine.cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """What the swap space holds of a preempted sequence."""

    blocks: list[int]  # of the swap space
    num_tokens: int  # whose keys and values are in these blocks: its first ones
    num_draft_tokens: int  # of these, the first ones that a draft model has computed, too (Part 16)


class SwapSpace:
    """`num_blocks` blocks in the CPU's memory, of the same size as those of the cache."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self.sequences: dict[str, SwappedSequence] = {}  # by id

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self.sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def put(
        self, seq_id: str, num_blocks: int, num_tokens: int, num_draft_tokens: int = 0
    ) -> SwappedSequence | None:
        """Reserve `num_blocks` blocks for a sequence's first `num_tokens` tokens. None: fewer are free."""
        blocks = self.blocks.allocate(num_blocks)
        if blocks is None:
            return None
        swapped = self.sequences[seq_id] = SwappedSequence(blocks, num_tokens, num_draft_tokens)
        return swapped

    def take(self, seq_id: str) -> SwappedSequence:
        """Remove a sequence that is swapped in. Its blocks are free at once: copies are made in the order in
        which they are planned, so whatever is copied here later comes behind this sequence's copy back.
        """
        swapped = self.sequences.pop(seq_id)
        self.blocks.free(swapped.blocks)
        return swapped

    def drop(self, seq_id: str) -> None:
        """Forget a sequence that will not come back. Does nothing for one that is not here."""
        if seq_id in self.sequences:
            self.take(seq_id)
