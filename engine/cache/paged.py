"""A KV cache in pages: a sequence's tokens lie in blocks of P tokens, anywhere, listed in its block table.

This module is the plan, on the host; engine/cache/memory.py is the memory. A sequence holds no more memory
than it needs, rounded up to a block. Sequences share the blocks that they have in common (a prompt's known
beginning, the samples of one request), and never write a shared block. A preempted sequence comes back with
the keys and values that were swapped out, or computes them again. Every move of blocks (a fork, out to the
swap space, back in) is a `Copy` in the next step's record. Part 12.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from engine.cache.allocation import Allocation, ComputedPrefix
from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.manager import CachedSequence, DraftProgress, Locations, Usage
from engine.cache.prefix import Prefix, PrefixCache, root
from engine.cache.swap import SwapSpace
from engine.requests.batch import Copy

PreemptionMode = Literal["recompute", "swap"]
SWAP_FROM = 32  # computed tokens; sequences with fewer leave the swap space to longer sequences


class PagedCache:
    """The plan of `num_blocks` blocks of `block_size` tokens, and of a swap space of `num_swap_blocks`.

    Methods without a docstring are as in `KVCacheManager`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = True,
        preemption_mode: PreemptionMode | None = None,
        window: int | None = None,
    ) -> None:
        """`preemption_mode`: "recompute" never swaps, "swap" swaps whenever there is room, and None swaps
        sequences with at least SWAP_FROM computed tokens if there is room. `window`: no layer sees more
        than this many last tokens, so the blocks before them are given back (Extension C); None: a layer sees
        all. Raises ValueError for another mode, and for "swap" without swap blocks.
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
        self.queried_tokens = self.hit_tokens = 0  # over all admissions, as in vLLM's prefix cache metrics
        self.num_swapped = 0  # preempted sequences whose blocks were copied out
        self._copies: list[Copy] = []  # planned since the last step
        self._num_copies = 0  # planned since the start, which numbers the copies
        self._enable_prefix_caching, self._preemption_mode = enable_prefix_caching, preemption_mode
        self._window = window

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens need, the last one full or not."""
        return -(-num_tokens // self.block_size)

    def admit(self, seq: CachedSequence) -> int | None:
        """Admit a sequence if there is room for all its known tokens: a `reserve` right after is not refused.

        Returns how many of the sequence's first tokens have keys and values already. These come from the swap
        space if the sequence is there, otherwise from its parent's blocks if its parent is in the cache and
        has given back none, otherwise from the prefix cache. A sequence whose prompt is scored needs the
        logits of each token, so it shares nothing. Full blocks are shared. A block that is not full is
        copied, since the sequence will write to it. Returns None, and changes nothing, if the sequence cannot
        be admitted now.
        """
        num_needed = self.num_blocks_for(len(seq.token_ids))
        if not self.blocks.num_free:  # every admission takes a free block, so the lookup can be skipped
            return None
        if seq.id in self.swap:
            return self._swap_in(seq, num_needed)
        # 1. Find the blocks that are there already.
        computed = self._computed_prefix(seq)
        if computed is None:
            return None
        cached_blocks, num_cached = computed.blocks, computed.num_tokens
        # 2. Is there room for the rest, with the copy of a block that is not full? A cached block without a
        #    reference counts as free, too, but is taken.
        num_unreferenced = sum(1 for block in cached_blocks if not self.blocks.references[block])
        if num_needed - num_cached // self.block_size + num_unreferenced > self.blocks.num_free:
            return None
        # 3. Share the full blocks, and copy the block that is not full.
        allocation = self.allocations[seq.id] = Allocation(num_committed=num_cached, chain=computed.chain)
        full_blocks = cached_blocks[: num_cached // self.block_size]
        self.blocks.fork(full_blocks)
        allocation.table.append(full_blocks)
        if num_cached % self.block_size:
            copy = self._allocate(1)
            self._move("fork", cached_blocks[-1:], copy)
            allocation.table.append(copy)
        self.queried_tokens += len(seq.token_ids)
        self.hit_tokens += num_cached
        num_draft_blocks = self.prefixes.num_draft_computed(full_blocks)
        allocation.draft_progress = DraftProgress(num_draft_blocks * self.block_size)
        self.draft_progress[seq.id] = allocation.draft_progress
        return num_cached

    def _computed_prefix(self, seq: CachedSequence) -> ComputedPrefix | None:
        """The sequence's first tokens that are computed already, by its parent or another sequence. None if
        the sequence must wait, because its parent still computes tokens that both have in common.
        """
        if seq.wants_every_row:
            return ComputedPrefix()
        if seq.parent is not None:
            parent = self.allocations.get(seq.parent.id)
            if parent is not None and not parent.num_blocks_given_back:
                return self._prefix_of_parent(seq, seq.parent.token_ids, parent)
        blocks = self.prefixes.match(seq.token_ids, seq.adapter, seq.cache_salt)
        chain = [self.prefixes.prefix(block) for block in blocks]
        return ComputedPrefix(len(blocks) * self.block_size, blocks, chain)

    def _prefix_of_parent(
        self, seq: CachedSequence, parent_ids: Sequence[int], parent: Allocation
    ) -> ComputedPrefix | None:
        """The first tokens that the sequence shares with its parent, whose tokens and allocation are given.
        None if the parent still computes them.
        """
        # The last token must be computed, for its logits, so it is never shared.
        num_equal = _num_equal_first(parent_ids, seq.token_ids)
        num_tokens = min(num_equal, len(seq.token_ids) - 1)
        # A decoding parent's newest token is known but not computed, hence the - 1. If more is missing, the
        # parent still computes the shared prompt.
        if parent.num_committed < num_tokens - 1:
            return None
        num_tokens = min(num_tokens, parent.num_committed)
        blocks = parent.table.blocks[: self.num_blocks_for(num_tokens)].tolist()
        return ComputedPrefix(num_tokens, blocks, parent.chain[: num_tokens // self.block_size])

    def _swap_in(self, seq: CachedSequence, num_needed: int) -> int | None:
        """Admit a sequence that was swapped out, if `num_needed` blocks are free. Returns as `admit` does.

        `queried_tokens` stays as it is, since nothing is looked up in the prefix cache.
        """
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
        """Allocate `count` blocks. The caller has checked that this many are free."""
        blocks = self.blocks.allocate(count)
        assert blocks is not None, f"{count} blocks are not free"
        return blocks

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        """As in `KVCacheManager`. Takes all blocks that are missing, or none if too few are free."""
        allocation = self.allocations[seq.id]
        if num_tokens <= allocation.num_reserved:  # true in most steps, since a block has room for several
            return True
        missing = max(0, self.num_blocks_for(num_tokens) - len(allocation.table))
        blocks = self.blocks.allocate(missing, allocation.table.last)
        if blocks is None:
            return False
        allocation.table.append(blocks)
        allocation.num_reserved = len(allocation.table) * self.block_size
        return True

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """As in `KVCacheManager`. With prefix caching, full blocks join the prefix cache. With a window,
        blocks before it are given back.
        """
        allocation = self.allocations[seq.id]
        allocation.num_committed = num_tokens
        if self._enable_prefix_caching:
            if num_tokens >= (len(allocation.chain) + 1) * self.block_size:  # a block has become full
                self._add_prefixes(seq, allocation, num_tokens)
            if allocation.draft_progress.num_tokens:
                self._mark_draft_computed(allocation, num_tokens)
        if self._window is not None:
            self._give_back(allocation, num_tokens, self._window)

    def _add_prefixes(self, seq: CachedSequence, allocation: Allocation, num_tokens: int) -> None:
        """Add the blocks that have become full to the prefix cache."""
        P, chain = self.block_size, allocation.chain
        for i in range(len(chain), num_tokens // P):  # the blocks that have become full
            parent = chain[-1] if chain else root(seq.adapter, seq.cache_salt)
            prefix = Prefix(parent, tuple(seq.token_ids[i * P : (i + 1) * P]))
            chain.append(self.prefixes.add(prefix, int(allocation.table.blocks[i])))

    def _mark_draft_computed(self, allocation: Allocation, num_tokens: int) -> None:
        """Note in the prefix cache which of the full blocks a draft model has computed, too."""
        start = allocation.num_draft_blocks  # those before are noted
        end = min(allocation.draft_progress.num_tokens, num_tokens) // self.block_size
        if start < end:
            self.prefixes.mark_draft_computed(allocation.table.blocks[start:end].tolist())
            allocation.num_draft_blocks = end

    def _give_back(self, allocation: Allocation, num_tokens: int, window: int) -> None:
        """Free the blocks that no later query sees. The next query has position `num_tokens`, and sees its
        own key and the `window` - 1 keys before it.
        """
        num_unseen_blocks = max(0, num_tokens + 1 - window) // self.block_size
        if num_unseen_blocks > allocation.num_blocks_given_back:
            self.blocks.free(
                allocation.table.blocks[allocation.num_blocks_given_back : num_unseen_blocks].tolist()
            )
            allocation.num_blocks_given_back = num_unseen_blocks

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        """As in `KVCacheManager`. Frees the blocks in which none of the first `num_tokens` tokens lies."""
        allocation, num_blocks = self.allocations[seq.id], self.num_blocks_for(num_tokens)
        if num_blocks >= len(allocation.table):
            return
        blocks = allocation.table.blocks.tolist()
        allocation.table = BlockTable()
        allocation.table.append(blocks[:num_blocks])
        allocation.num_reserved = num_blocks * self.block_size
        self.blocks.free(blocks[num_blocks:])

    def preempt(self, seq: CachedSequence) -> None:
        """Free a sequence's blocks. As `preemption_mode` says, and if there is room, blocks with committed
        tokens are copied to the swap space first. A sequence that wants every row is never copied, since its
        prompt must be computed again for the logits, nor is one that has given back blocks.
        """
        allocation = self.allocations[seq.id]
        num_committed = allocation.num_committed
        min_tokens = SWAP_FROM if self._preemption_mode is None else 1
        may_swap = (
            self._preemption_mode != "recompute"
            and num_committed >= min_tokens
            and not seq.wants_every_row
            and not allocation.num_blocks_given_back
        )
        if may_swap:
            blocks = allocation.table.blocks[: self.num_blocks_for(num_committed)].tolist()
            num_draft_tokens = min(allocation.draft_progress.num_tokens, num_committed)
            swapped = self.swap.put(
                seq.id,
                num_blocks=len(blocks),
                num_tokens=num_committed,
                num_draft_tokens=num_draft_tokens,
            )
            if swapped is not None:
                self._move("out", blocks, swapped.blocks)
                self.num_swapped += 1
        self._free(seq)

    def release(self, seq: CachedSequence) -> None:
        """Free a finished sequence's blocks. The blocks of a failed sequence leave the prefix cache, even
        those that it has given back: their keys and values may be the cause of the failure.
        """
        self.swap.drop(seq.id)
        allocation = self.allocations.get(seq.id)
        if seq.error is not None and allocation is not None:
            for block, prefix in zip(allocation.table.blocks.tolist(), allocation.chain, strict=False):
                # A block that was given back may have other tokens by now.
                if block in self.prefixes and self.prefixes.prefix(block) == prefix:
                    self.prefixes.forget(block)
        self._free(seq)

    def _free(self, seq: CachedSequence) -> None:
        """Forget a sequence, and free its blocks. Does nothing for a sequence that is not admitted."""
        allocation = self.allocations.pop(seq.id, None)
        self.draft_progress.pop(seq.id, None)
        if allocation is not None:
            self.blocks.free(allocation.held)

    def reset_prefix_cache(self) -> bool:
        """Forget what the blocks hold, so that no later sequence shares it. Returns False, and changes
        nothing, if a sequence is admitted: its blocks are in use.
        """
        if self.allocations:
            return False
        for block in range(self.num_blocks):
            self.prefixes.forget(block)
        return True

    def fits(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    def usage(self) -> Usage:
        in_use = self.num_blocks - self.blocks.num_free
        return Usage(
            num_sequences=len(self.allocations),
            tokens_held=in_use * self.block_size,
            tokens_total=self.num_blocks * self.block_size,
        )

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        """As in `KVCacheManager`. A table has the blocks up to the sequence's last new token."""
        P = self.block_size
        tables = np.zeros((len(ids), max(positions) // P + 1), dtype=np.int64)  # [S, W]
        for s, seq_id in enumerate(ids):
            last_position = positions[query_start[s + 1] - 1]
            num_blocks = last_position // P + 1
            tables[s, :num_blocks] = self.allocations[seq_id].table.blocks[:num_blocks]
        sequence = np.arange(len(ids))  # [T]: of each new token, if each sequence has one, as in most steps
        if len(positions) > len(ids):
            sequence = sequence.repeat(np.diff(query_start))
        position = np.array(positions)  # [T]
        block = tables[sequence, position // P]  # [T]
        return Locations(tables, slots=block * P + position % P)

    def take_copies(self) -> tuple[Copy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def replan(self, copies: Sequence[Copy]) -> None:
        self._copies = [*copies, *self._copies]

    def _move(self, kind: Literal["fork", "out", "in"], source: Sequence[int], target: Sequence[int]) -> None:
        """Plan a copy of the blocks `source` to `target`, which the next step makes before it computes. The
        source may be freed at once: its next owner writes it by a later copy, or when that step computes.
        """
        self._copies.append(Copy(self._num_copies, kind, tuple(source), tuple(target)))
        self._num_copies += 1


def _num_equal_first(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first items of two sequences are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
