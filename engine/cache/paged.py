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
from engine.cache.manager import CachedSequence, DraftProgress, Locations, Usage
from engine.cache.prefix import Prefix, PrefixCache, root
from engine.cache.swap import SwapSpace
from engine.requests.batch import Copy

PreemptionMode = Literal["recompute", "swap"]
SWAP_FROM = 32  # computed tokens: sequences with fewer leave the swap space to longer ones


@dataclass(slots=True)
class Allocation:
    """The memory of one admitted sequence."""

    table: BlockTable = field(default_factory=BlockTable)
    num_reserved: int = 0  # tokens for which its blocks have room; 0 until `reserve` was called
    num_committed: int = 0  # its first tokens that are known and computed: these alone may be shared
    chain: list[Prefix] = field(default_factory=list)  # of its committed full blocks, in order
    # What a draft model has computed (Part 16); and how many of the first blocks the prefix cache has it of.
    draft_progress: DraftProgress = field(default_factory=lambda: DraftProgress(0))
    num_draft_blocks: int = 0


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
        sequences with at least SWAP_FROM computed tokens. Raises ValueError: another mode, or "swap" without
        swap blocks.
        """
        if preemption_mode not in (None, "recompute", "swap"):
            raise ValueError(f"{preemption_mode=}: accepted are 'recompute', 'swap' and None")
        if preemption_mode == "swap" and not num_swap_blocks:
            raise ValueError(f"{preemption_mode=} needs swap blocks; {num_swap_blocks=}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefixes = PrefixCache(block_size)
        self.blocks = BlockManager(num_blocks, self.prefixes)
        self.swap = SwapSpace(num_swap_blocks)
        self.allocations: dict[str, Allocation] = {}
        self.draft_progress: dict[str, DraftProgress] = {}
        self.queried_tokens = self.hit_tokens = 0  # of sequences admitted, as vLLM counts its prefix cache
        self.num_swapped = 0  # preempted sequences whose blocks were copied out
        self._copies: list[Copy] = []  # planned since the last step
        self._num_copies = 0
        self._enable_prefix_caching, self._mode = enable_prefix_caching, preemption_mode

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def admit(self, seq: CachedSequence) -> int | None:
        """Admit a sequence if there is room for all its known tokens: so `reserve` will not refuse them.

        Returns how many of its first tokens have their keys and values already; None: not now, and nothing
        has changed. They come from the swap space, else from its parent's blocks, else from the prefix cache.
        A sequence whose prompt is scored needs the logits of each token, so it shares nothing. Full blocks
        are shared. One that is not full is copied, since the sequence will write to it.
        """
        num_needed = self.num_blocks_for(len(seq.token_ids))
        if not self.blocks.num_free:  # every admission takes a block: spare the lookup of the prefix
            return None
        if seq.id in self.swap:
            return self._swap_in(seq, num_needed)
        # 1. What is there already.
        found_blocks, num_cached, chain = self._shared(seq)
        if found_blocks is None:
            return None
        # 2. Is there room for the rest? A found block without a reference is one of the free ones, too.
        num_idle = sum(not self.blocks.references[block] for block in found_blocks)
        if num_needed - num_cached // self.block_size + num_idle > self.blocks.num_free:
            return None
        # 3. Full blocks are shared. One that is not full will be written next, so it is copied.
        allocation = self.allocations[seq.id] = Allocation(num_committed=num_cached, chain=chain)
        full_blocks = found_blocks[: num_cached // self.block_size]
        self.blocks.fork(full_blocks)
        allocation.table.append(full_blocks)
        if num_cached % self.block_size:
            copy = self._allocate(1)
            self._move("fork", found_blocks[-1:], copy)
            allocation.table.append(copy)
        self.queried_tokens += len(seq.token_ids)
        self.hit_tokens += num_cached
        num_draft_blocks = self.prefixes.num_draft_computed(full_blocks)
        allocation.draft_progress = DraftProgress(num_draft_blocks * self.block_size)
        self.draft_progress[seq.id] = allocation.draft_progress
        return num_cached

    def _shared(self, seq: CachedSequence) -> tuple[list[int] | None, int, list[Prefix]]:
        """Blocks that hold the sequence's first tokens, how many tokens, and the chain of the full ones. None
        for the blocks: its parent is still computing them, so it has to wait.
        """
        if seq.wants_every_row:
            return [], 0, []
        parent = self.allocations.get(seq.parent.id) if seq.parent is not None else None
        if seq.parent is not None and parent is not None:
            # The first tokens of both, as far as they are equal; the last must be computed, for its logits.
            pairs = zip(seq.parent.token_ids, seq.token_ids, strict=False)
            num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_tokens = min(num_equal, len(seq.token_ids) - 1)
            # A decoding parent's newest token is known before it is computed, hence the - 1. Further behind,
            # it is still computing the prompt they share.
            if parent.num_committed < num_tokens - 1:
                return None, 0, []
            num_tokens = min(num_tokens, parent.num_committed)
            blocks = parent.table.blocks[: self.num_blocks_for(num_tokens)].tolist()
            return blocks, num_tokens, parent.chain[: num_tokens // self.block_size]
        blocks = self.prefixes.match(seq.token_ids, seq.adapter, seq.cache_salt)
        return blocks, len(blocks) * self.block_size, [self.prefixes.prefix(block) for block in blocks]

    def _swap_in(self, seq: CachedSequence, num_needed: int) -> int | None:
        """Admit a sequence that was swapped out; as `admit`, if `num_needed` blocks are free."""
        if num_needed > self.blocks.num_free:
            return None
        swapped = self.swap.take(seq.id)
        blocks = self._allocate(len(swapped.blocks))
        self._move("in", swapped.blocks, blocks)
        allocation = self.allocations[seq.id] = Allocation(num_committed=swapped.num_tokens)
        allocation.table.append(blocks)
        allocation.draft_progress = DraftProgress(swapped.num_draft_tokens)
        self.draft_progress[seq.id] = allocation.draft_progress
        return swapped.num_tokens

    def _allocate(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked that so many are free."""
        blocks = self.blocks.allocate(count)
        assert blocks is not None, f"{count} blocks are not free"
        return blocks

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        allocation = self.allocations[seq.id]
        if num_tokens <= allocation.num_reserved:  # in most steps: a block lasts for many
            return True
        missing = max(0, self.num_blocks_for(num_tokens) - len(allocation.table))
        blocks = self.blocks.allocate(missing, allocation.table.last)
        if blocks is None:
            return False
        allocation.table.append(blocks)
        allocation.num_reserved = len(allocation.table) * self.block_size
        return True

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """As in `KVCacheManager`. The prefix cache learns of blocks that have become full, and of those that
        a draft model has computed, too.
        """
        allocation, P = self.allocations[seq.id], self.block_size
        allocation.num_committed = num_tokens
        if not self._enable_prefix_caching:
            return
        if num_tokens >= (len(allocation.chain) + 1) * P:  # a block has become full
            for i in range(len(allocation.chain), num_tokens // P):
                parent = allocation.chain[-1] if allocation.chain else root(seq.adapter, seq.cache_salt)
                prefix = Prefix(parent, tuple(seq.token_ids[i * P : (i + 1) * P]))
                allocation.chain.append(self.prefixes.add(prefix, int(allocation.table.blocks[i])))
        if not allocation.draft_progress.num_tokens:
            return
        start, end = allocation.num_draft_blocks, min(allocation.draft_progress.num_tokens, num_tokens) // P
        if start < end:
            self.prefixes.mark_draft_computed(allocation.table.blocks[start:end].tolist())
            allocation.num_draft_blocks = end

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        allocation, num_blocks = self.allocations[seq.id], self.num_blocks_for(num_tokens)
        if num_blocks >= len(allocation.table):
            return
        blocks = allocation.table.blocks.tolist()
        allocation.table = BlockTable()
        allocation.table.append(blocks[:num_blocks])
        allocation.num_reserved = num_blocks * self.block_size
        self.blocks.free(blocks[num_blocks:])

    def preempt(self, seq: CachedSequence) -> None:
        """Free a sequence's blocks; what is committed is copied out first, if `preemption_mode` says so. A
        sequence that wants every row is not: its prompt is computed again, for its logits.
        """
        num_committed = self.allocations[seq.id].num_committed
        min_tokens = SWAP_FROM if self._mode is None else 1
        may_swap = self._mode != "recompute" and not seq.wants_every_row
        if may_swap and num_committed >= min_tokens:
            table = self.allocations[seq.id].table
            blocks = table.blocks[: self.num_blocks_for(num_committed)].tolist()
            num_draft_tokens = min(self.draft_progress[seq.id].num_tokens, num_committed)
            swapped = self.swap.put(seq.id, len(blocks), num_committed, num_draft_tokens)
            if swapped is not None:
                self._move("out", blocks, swapped.blocks)
                self.num_swapped += 1
        self._free(seq)

    def release(self, seq: CachedSequence) -> None:
        """Free a finished sequence's blocks. Those of a failed one leave the prefix cache: their keys and
        values may be what made it fail.
        """
        self.swap.drop(seq.id)
        if seq.error is not None and seq.id in self.allocations:
            for block in self.allocations[seq.id].table.blocks.tolist():
                self.prefixes.forget(block)
        self._free(seq)

    def _free(self, seq: CachedSequence) -> None:
        allocation = self.allocations.pop(seq.id, None)
        self.draft_progress.pop(seq.id, None)
        if allocation is not None:
            self.blocks.free(allocation.table.blocks.tolist())

    def fits(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    def usage(self) -> Usage:
        in_use = self.num_blocks - self.blocks.num_free
        return Usage(len(self.allocations), in_use * self.block_size, self.num_blocks * self.block_size)

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        P = self.block_size
        counts = [positions[end - 1] // P + 1 for end in query_start[1:]]  # [S]: blocks up to the last token
        tables = np.zeros((len(ids), max(counts)), dtype=np.int64)  # [S, W]
        for row, seq_id, count in zip(tables, ids, counts, strict=True):
            row[:count] = self.allocations[seq_id].table.blocks[:count]
        sequence = np.arange(len(ids))
        if len(positions) > len(ids):  # mostly each has one new token
            sequence = sequence.repeat(np.diff(query_start))  # [T]
        block, offset = np.divmod(positions, P)  # [T]
        return Locations(tables, tables[sequence, block] * P + offset)

    def take_copies(self) -> tuple[Copy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def replan(self, copies: Sequence[Copy]) -> None:
        self._copies = [*copies, *self._copies]

    def _move(self, kind: Literal["fork", "out", "in"], source: Sequence[int], target: Sequence[int]) -> None:
        """Plan a copy of `source` blocks to `target`, made before the next step computes. The source may be
        freed at once: its next owner writes it in that step at the earliest, or by a later copy.
        """
        self._copies.append(Copy(self._num_copies, kind, tuple(source), tuple(target)))
        self._num_copies += 1
