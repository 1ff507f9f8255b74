"""What a paged cache notes of each admitted sequence, and what it finds computed for a new one. Part 12.

Two records of the plan (engine/cache/paged.py), in numbers of blocks and tokens. They know no tensor.
"""

from dataclasses import dataclass, field

from engine.cache.blocks import BlockTable
from engine.cache.manager import DraftProgress
from engine.cache.prefix import Prefix


@dataclass(slots=True)
class Allocation:
    """The memory of one admitted sequence. Numbers are of tokens, unless their names say of blocks."""

    table: BlockTable = field(default_factory=BlockTable)
    num_reserved: int = 0  # tokens for which the blocks have room, by the last `reserve` or `trim`; 0 before
    num_committed: int = 0  # how many of the first tokens are known and computed; only these may be shared
    chain: list[Prefix] = field(default_factory=list)  # of the committed full blocks, in order
    draft_progress: DraftProgress = field(default_factory=lambda: DraftProgress(0))
    num_draft_blocks: int = 0  # how many of the first blocks the prefix cache knows as the draft model's, too
    # How many of the first blocks are given back, because no layer sees their tokens any more (Extension C).
    # The table keeps their numbers, so that token i still lies in block i // P of the table, but other
    # sequences may use these blocks now.
    num_blocks_given_back: int = 0

    @property
    def held(self) -> list[int]:
        """The sequence's blocks, without those that it has given back."""
        return self.table.blocks[self.num_blocks_given_back :].tolist()


@dataclass(frozen=True, slots=True)
class ComputedPrefix:
    """The first tokens of a sequence whose keys and values lie in blocks of other sequences."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)  # with these tokens, in order; the last may not be full
    chain: list[Prefix] = field(default_factory=list)  # of the full blocks, in order
