"""Swap space: blocks in the CPU's memory for the keys and values of preempted sequences.

A preempted sequence comes back in one of two ways: its tokens are computed again, or its blocks were copied
to the swap space and are copied back. This module has only the plan, in block numbers; engine/cache/memory.py
has the memory. No two sequences share a block of the swap space. Part 12.
"""

from dataclasses import dataclass

from engine.cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """The blocks and tokens of a preempted sequence in the swap space."""

    blocks: list[int]  # of the swap space
    num_tokens: int  # how many of the sequence's first tokens have keys and values in these blocks
    num_draft_tokens: int  # how many of these tokens a draft model has computed, too (Part 16)


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
        self, seq_id: str, num_blocks: int, num_tokens: int, num_draft_tokens: int
    ) -> SwappedSequence | None:
        """Reserve `num_blocks` blocks for a sequence's first `num_tokens` tokens, of which a draft model has
        computed the first `num_draft_tokens`, too. Returns None, and reserves nothing, if fewer blocks are
        free.
        """
        blocks = self.blocks.allocate(num_blocks)
        if blocks is None:
            return None
        swapped = self.sequences[seq_id] = SwappedSequence(blocks, num_tokens, num_draft_tokens)
        return swapped

    def take(self, seq_id: str) -> SwappedSequence:
        """Remove and return a sequence that is swapped in. Its blocks are free at once: copies are made in
        the order in which they are planned, so this sequence is copied back before its blocks are written
        again. Raises KeyError for a sequence that is not here.
        """
        swapped = self.sequences.pop(seq_id)
        self.blocks.free(swapped.blocks)
        return swapped

    def drop(self, seq_id: str) -> None:
        """Forget a sequence that will not come back. Does nothing for a sequence that is not here."""
        if seq_id in self.sequences:
            self.take(seq_id)
