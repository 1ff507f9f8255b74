"""A KV cache in pages: a sequence's tokens lie in blocks of P tokens, anywhere, listed in its block table.

This is the plan, on the host; engine/cache/memory.py has the memory. Promises that a sequence holds no more
than it needs, rounded up to a block; that sequences share what they have in common (a prompt's known
beginning, the samples of one request) and never write what they share; and that a preempted sequence comes
back with the keys it left with, or computes them again. Every move of blocks (a fork, out to the swap space,
back in) is a `Copy` in the next step's record. Part 12.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np

from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.manager import CachedSequence, Drafted, Places, Usage
from engine.cache.prefix import Prefix, PrefixCache, root
from engine.cache.swap import SwapSpace
from engine.requests.batch import Copy

PreemptionMode = Literal["recompute", "swap"]
SWAP_FROM = 32  # tokens: who loses fewer leaves the swap space to those who lose more


@dataclass(slots=True)
class Held:
    """What an admitted sequence has."""

    table: BlockTable = field(default_factory=BlockTable)
    room: int = 0  # tokens that `reserve` found room for, and up to the end of the last block
    committed: int = 0  # its first tokens whose keys are computed, and known: these alone may be shared
    # Of its committed full blocks, as the prefix cache has it.
    chain: list[Prefix] = field(default_factory=list)
    drafted: Drafted = field(default_factory=lambda: Drafted(0))  # what a draft model has of it (Part 16)
    num_marked: int = 0  # blocks that the prefix cache has been told a draft model has read (Part 16)


class PagedCache:
    """`num_blocks` blocks of `block_size` tokens, and a swap space of `num_swap_blocks`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = True,
        preemption_mode: PreemptionMode | None = None,
    ) -> None:
        """`preemption_mode`: "recompute" never swaps, "swap" always does if there is room, None swaps
        sequences with at least SWAP_FROM computed tokens. Raises ValueError: to swap, with no room for it.
        """
        if preemption_mode not in (None, "recompute", "swap"):
            raise ValueError(f"{preemption_mode=}: accepted are 'recompute', 'swap' and None")
        if preemption_mode == "swap" and not num_swap_blocks:
            raise ValueError(f"{preemption_mode=} needs swap blocks; {num_swap_blocks=}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefixes = PrefixCache(block_size)
        self.blocks = BlockManager(num_blocks, self.prefixes)
        self.swap = SwapSpace(num_swap_blocks)
        self.held: dict[str, Held] = {}
        self.drafted: dict[str, Drafted] = {}
        self.queried_tokens = self.hit_tokens = 0  # of sequences admitted, as vLLM counts its prefix cache
        self.num_swapped = 0  # preempted sequences whose blocks were copied out
        self._copies: list[Copy] = []  # planned since the last step
        self._num_copies = 0
        self._enable_prefix_caching, self._mode = enable_prefix_caching, preemption_mode

    def num_blocks_for(self, total: int) -> int:
        """Blocks that `total` tokens need."""
        return -(-total // self.block_size)

    def begin(self, seq: CachedSequence) -> int | None:
        """Admit a sequence if there is room for all its known tokens: so `reserve` will not refuse them.

        It starts behind what is there already: its own blocks if they were swapped out, else what it shares
        with its parent, else the beginning that the prefix cache knows; nothing if it wants every row. Of a
        block that is not full, which it will write next, it gets a copy (`_allocated`, `_move`).
        """
        needed = self.num_blocks_for(len(seq.token_ids))
        if not self.blocks.num_free:  # at least one block is never shared
            return None
        if seq.id in self.swap:
            return self._swap_in(seq, needed)
        # 1. What is there already.
        found, tokens, chain = self._shared(seq)
        if found is None:
            return None
        # 2. Is there room for the rest? A found block that nobody has is taken from the free ones, too.
        idle = sum(not self.blocks.references[block] for block in found)
        if needed - tokens // self.block_size + idle > self.blocks.num_free:
            return None
        # 3. Full blocks are shared. One that is not full will be written next, so it is copied.
        held = self.held[seq.id] = Held(committed=tokens, chain=chain)
        full = found[: tokens // self.block_size]
        self.blocks.fork(full)
        held.table.append(full)
        if tokens % self.block_size:
            copy = self._allocated(1)
            self._move("fork", found[-1:], copy)
            held.table.append(copy)
        self.queried_tokens += len(seq.token_ids)
        self.hit_tokens += tokens
        held.drafted = self.drafted[seq.id] = Drafted(self.block_size * self.prefixes.num_drafted(full))
        return tokens

    def _shared(self, seq: CachedSequence) -> tuple[list[int] | None, int, list[Prefix]]:
        """Blocks that hold the sequence's first tokens, how many tokens, and their chain. None: wait for
        them.
        """
        if seq.wants_every_row:
            return [], 0, []
        parent = self.held.get(seq.parent.id) if seq.parent is not None else None
        if seq.parent is not None and parent is not None:
            pairs = zip(seq.parent.token_ids, seq.token_ids, strict=False)
            same = takewhile(lambda pair: pair[0] == pair[1], pairs)
            tokens = min(sum(1 for _ in same), len(seq.token_ids) - 1)
            if parent.committed < tokens - 1:  # its prompt is being computed
                return None, 0, []
            tokens = min(tokens, parent.committed)
            blocks = parent.table.blocks[: self.num_blocks_for(tokens)].tolist()
            return blocks, tokens, parent.chain[: tokens // self.block_size]
        blocks = self.prefixes.match(seq.token_ids, seq.adapter, seq.cache_salt)
        return blocks, len(blocks) * self.block_size, [self.prefixes.prefix(block) for block in blocks]

    def _swap_in(self, seq: CachedSequence, needed: int) -> int | None:
        if needed > self.blocks.num_free:
            return None
        away = self.swap.take(seq.id)
        blocks = self._allocated(len(away.blocks))
        self._move("in", away.blocks, blocks)
        held = self.held[seq.id] = Held(committed=away.num_tokens)
        held.table.append(blocks)
        held.drafted = self.drafted[seq.id] = Drafted(away.drafted)
        return away.num_tokens

    def _allocated(self, count: int) -> list[int]:
        """So many blocks, which are known to be free."""
        blocks = self.blocks.allocate(count)
        assert blocks is not None, f"{count} blocks are not free"
        return blocks

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        held = self.held[seq.id]
        if total <= held.room:  # mostly: a block lasts for many steps
            return True
        missing = max(0, self.num_blocks_for(total) - len(held.table))
        blocks = self.blocks.allocate(missing, held.table.last)
        if blocks is None:
            return False
        held.table.append(blocks)
        held.room = len(held.table) * self.block_size
        return True

    def commit(self, seq: CachedSequence, total: int) -> None:
        """Blocks that are full by now can be found by their tokens, and those that a draft model has read,
        too, by it.
        """
        held, P = self.held[seq.id], self.block_size
        held.committed = total
        if not self._enable_prefix_caching:
            return
        if total >= (len(held.chain) + 1) * P:  # a block has become full
            for i in range(len(held.chain), total // P):
                parent = held.chain[-1] if held.chain else root(seq.adapter, seq.cache_salt)
                prefix = Prefix(parent, tuple(seq.token_ids[i * P : (i + 1) * P]))
                held.chain.append(self.prefixes.add(prefix, int(held.table.blocks[i])))
        if not held.drafted.num_tokens:
            return
        drafted = min(held.drafted.num_tokens, total) // P
        if drafted > held.num_marked:
            self.prefixes.mark_drafted(held.table.blocks[held.num_marked : drafted].tolist())
            held.num_marked = drafted

    def trim(self, seq: CachedSequence, total: int) -> None:
        held, keep = self.held[seq.id], self.num_blocks_for(total)
        if keep >= len(held.table):
            return
        blocks, held.table = held.table.blocks.tolist(), BlockTable()
        held.table.append(blocks[:keep])
        held.room = keep * self.block_size
        self.blocks.free(blocks[keep:])

    def preempt(self, seq: CachedSequence) -> None:
        """Its blocks are free; what is committed was copied out first, if `preemption_mode` says so."""
        held = self.held[seq.id]
        least = {"swap": 1, None: SWAP_FROM}.get(self._mode)
        if least and held.committed >= least and not seq.wants_every_row:
            blocks = held.table.blocks[: self.num_blocks_for(held.committed)].tolist()
            drafted = min(self.drafted[seq.id].num_tokens, held.committed)
            away = self.swap.put(seq.id, len(blocks), held.committed, drafted)
            if away is not None:
                self._move("out", blocks, away.blocks)
                self.num_swapped += 1
        self._give_up(seq)

    def release(self, seq: CachedSequence) -> None:
        """What a failed sequence computed is not to be found again: it may be what made it fail."""
        self.swap.drop(seq.id)
        if seq.error is not None and seq.id in self.held:
            for block in self.held[seq.id].table.blocks.tolist():
                self.prefixes.forget(block)
        self._give_up(seq)

    def _give_up(self, seq: CachedSequence) -> None:
        held = self.held.pop(seq.id, None)
        self.drafted.pop(seq.id, None)
        if held is not None:
            self.blocks.free(held.table.blocks.tolist())

    def fits(self, total: int) -> bool:
        return self.num_blocks_for(total) <= self.num_blocks

    def usage(self) -> Usage:
        in_use = self.num_blocks - self.blocks.num_free
        return Usage(len(self.held), in_use * self.block_size, self.num_blocks * self.block_size)

    def places(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Places:
        P = self.block_size
        counts = [positions[end - 1] // P + 1 for end in query_start[1:]]  # [S]: blocks
        tables = np.zeros((len(ids), max(counts)), dtype=np.int64)
        for row, name, count in zip(tables, ids, counts, strict=True):
            row[:count] = self.held[name].table.blocks[:count]
        sequence = np.arange(len(ids))
        if len(positions) > len(ids):  # mostly each has one new token
            sequence = sequence.repeat(np.diff(query_start))  # [T]
        block, offset = np.divmod(positions, P)  # [T]
        return Places(tables, tables[sequence, block] * P + offset)

    def take_copies(self) -> tuple[Copy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def retry(self, copies: Sequence[Copy]) -> None:
        self._copies = [*copies, *self._copies]

    def _move(self, kind: Literal["fork", "out", "in"], source: Sequence[int], target: Sequence[int]) -> None:
        """Blocks are copied before the next step computes. Until then nobody else writes what they hold: it
        is given to others in that step at the earliest, whose copies come behind this one.
        """
        self._copies.append(Copy(self._num_copies, kind, tuple(source), tuple(target)))
        self._num_copies += 1
