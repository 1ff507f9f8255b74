"""A KV cache in pages: a sequence's tokens lie in blocks of P tokens, anywhere, listed in its block table.

Promises the attention that slots give; that a sequence holds no more than it needs, rounded up to a block;
that sequences share what they have in common (a prompt's known beginning, the samples of one request) and
never write what they share; and that a preempted sequence comes back with the keys it left with, or computes
them again. Takes the mathematics as arguments: a varlen kernel, and how single tokens read pages. Part 12.
"""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.attention.paged import (
    PagedDecode,
    PagedPrefill,
    Pages,
    Store,
    gather,
    paged_decode,
    store_by_index,
)
from engine.attention.together import side_by_side
from engine.batch import Batch
from engine.cache.alone import Alone
from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.manager import CachedSequence, Usage
from engine.cache.prefix import Prefix, PrefixCache, root
from engine.cache.swap import SwapSpace
from engine.config import ModelConfig
from engine.device import on_device

PreemptionMode = Literal["recompute", "swap"]
FEW = 8  # new tokens of a sequence that are attended row by row: a call of its own costs more
SWAP_FROM = 32  # tokens: who loses fewer leaves the swap space to those who lose more


@dataclass(slots=True)
class Held:
    """What an admitted sequence has."""

    table: BlockTable = field(default_factory=BlockTable)
    room: int = 0  # tokens that `reserve` found room for, and up to the end of the last block
    committed: int = 0  # its first tokens whose keys are computed, and known: these alone may be shared
    # Of its committed full blocks, as the prefix cache has it.
    chain: list[Prefix] = field(default_factory=list)


class PagedCache:
    """`num_blocks` blocks of `block_size` tokens, allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: VarlenKernel = dense_attention,
        decode: PagedDecode = paged_decode,
        prefill: PagedPrefill | None = None,
        store: Store = store_by_index,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        preemption_mode: PreemptionMode | None = None,
    ) -> None:
        """`prefill` reads the pages of sequences with several new tokens; else `kernel` gets them gathered.

        `preemption_mode`: "recompute" never swaps, "swap" always does if there is room, None swaps
        sequences with at least SWAP_FROM computed tokens. Raises ValueError: to swap, with no room for it.
        """
        if preemption_mode not in (None, "recompute", "swap"):
            raise ValueError(f"{preemption_mode=}: accepted are 'recompute', 'swap' and None")
        if preemption_mode == "swap" and not num_swap_blocks:
            raise ValueError(f"{preemption_mode=} needs swap blocks; {num_swap_blocks=}")
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)  # [2, L, B, P, Hkv, Dh]
        self.keys, self.values = (layers.unbind() for layers in self.memory)  # by layer: [B, P, Hkv, Dh]
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefixes = PrefixCache(block_size)
        self.blocks = BlockManager(num_blocks, self.prefixes)
        self.swap = SwapSpace(self.memory, num_swap_blocks)
        self.held: dict[str, Held] = {}
        self.queried_tokens = self.hit_tokens = 0  # of sequences admitted, as vLLM counts its prefix cache
        self.num_swapped = 0  # preempted sequences whose blocks were copied out
        self._num_heads, self._kernel = config.num_heads, kernel
        self._decode, self._prefill, self._store = decode, prefill, store
        self._kernels_read_pages = self.memory.is_cuda or prefill is not None
        self._alone = Alone(self.memory, kernel)
        self._enable_prefix_caching, self._mode = enable_prefix_caching, preemption_mode

    def num_blocks_for(self, total: int) -> int:
        """Blocks that `total` tokens need."""
        return -(-total // self.block_size)

    def begin(self, seq: CachedSequence) -> int | None:
        """Admit a sequence if there is room for all its known tokens: so `reserve` will not refuse them.

        It starts behind what is there already: its own blocks if they were swapped out, else what it shares
        with its parent, else the beginning that the prefix cache knows; nothing if it wants every row.
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
        # 3. Full blocks are shared. One that is not full will be written next, so it is copied now.
        held = self.held[seq.id] = Held(committed=tokens, chain=chain)
        full = found[: tokens // self.block_size]
        self.blocks.fork(full)
        held.table.append(full)
        if tokens % self.block_size:
            own = self.blocks.allocate(1)
            self.memory[:, :, own[0]] = self.memory[:, :, found[-1]]
            held.table.append(own)
        self.queried_tokens += len(seq.token_ids)
        self.hit_tokens += tokens
        return tokens

    def _shared(self, seq: CachedSequence) -> tuple[list[int] | None, int, list[Prefix]]:
        """Blocks that hold the sequence's first tokens, how many tokens, and their chain. None: wait for
        them.
        """
        if seq.wants_every_row:
            return [], 0, []
        parent = self.held.get(seq.parent.id) if seq.parent is not None else None
        if parent is not None:
            same = takewhile(
                lambda pair: pair[0] == pair[1], zip(seq.parent.token_ids, seq.token_ids, strict=False)
            )
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
        held = self.held[seq.id] = Held()
        held.table.append(self.blocks.allocate(self.swap.num_blocks_of(seq.id)))
        held.committed = self.swap.take(seq.id, self.memory, held.table.blocks)
        return held.committed

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
        """Blocks that are full by now can be found by their tokens."""
        held, P = self.held[seq.id], self.block_size
        held.committed = total
        if not self._enable_prefix_caching or total < (len(held.chain) + 1) * P:  # no block has become full
            return
        for i in range(len(held.chain), total // P):
            parent = held.chain[-1] if held.chain else root(seq.adapter, seq.cache_salt)
            prefix = Prefix(parent, tuple(seq.token_ids[i * P : (i + 1) * P]))
            held.chain.append(self.prefixes.add(prefix, int(held.table.blocks[i])))

    def trim(self, seq: CachedSequence, total: int) -> None:
        held, keep = self.held[seq.id], self.num_blocks_for(total)
        if keep >= len(held.table):
            return
        blocks, held.table = held.table.blocks.tolist(), BlockTable()
        held.table.append(blocks[:keep])
        held.room = keep * self.block_size
        self._alone.forget()
        self.blocks.free(blocks[keep:])

    def preempt(self, seq: CachedSequence) -> None:
        """Its blocks are free; what is committed was copied out first, if `preemption_mode` says so."""
        held = self.held[seq.id]
        least = {"swap": 1, None: SWAP_FROM}.get(self._mode)
        if least and held.committed >= least and not seq.wants_every_row:
            blocks = held.table.blocks[: self.num_blocks_for(held.committed)]
            self.num_swapped += self.swap.put(seq.id, self.memory, blocks, held.committed)
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
        self._alone.forget()
        if held is not None:
            self.blocks.free(held.table.blocks.tolist())

    def fits(self, total: int) -> bool:
        return self.num_blocks_for(total) <= self.num_blocks

    def usage(self) -> Usage:
        in_use = self.num_blocks - self.blocks.num_free
        return Usage(len(self.held), in_use * self.block_size, self.num_blocks * self.block_size)

    def pages(self, batch: Batch) -> Pages:
        """Where the batch's sequences lie."""
        tables = [self.held[request.id].table.blocks for request in batch.requests]
        return Pages.of(tables, batch.context_lens, self.block_size)

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step. What is the same in every layer is worked out here, once.

        1. A sequence alone goes to the varlen kernel in one piece, unless there are kernels that read pages.
        2. Else all new keys and values are stored by their slot mapping (block · P + place). Then sequences
           with one new token each read pages together (`_decode`); on a CPU so do those with few, each token
           as a row that sees what is before it. Everybody else goes to the varlen kernel in one call, on keys
           that were computed just now, or that are gathered from the pages if some were there before.
        """
        if len(batch.requests) == 1 and not self._kernels_read_pages:
            table = self.held[batch.requests[0].id].table
            return self._alone.attention(table, batch.num_tokens, batch.context_lens[0])
        self._alone.forget()
        device = self.memory.device
        pages, new = self.pages(batch), np.diff(batch.query_start)
        # The slot mapping: where each of the T new tokens is stored.
        sequence = np.repeat(np.arange(len(new)), new)  # [T]
        positions = np.array(batch.positions)  # [T]
        (slots,) = on_device(device, pages.places(sequence, positions))
        # Who attends how: the rows of the step, and their plan.
        single = new <= (1 if self._kernels_read_pages else FEW)  # [S]
        mask = single[sequence]  # [T]
        looks: list[tuple[slice | Tensor, Attend]] = []  # some of the T rows, and how they are attended
        if single.any():
            own = Pages(pages.tables[sequence[mask]], positions[mask] + 1, self.block_size)
            plan = self._decode(own, self._num_heads, self.keys[0])
            one_by_one = self._rows(mask)
            looks.append((one_by_one, lambda layer, q, k, v: plan(q, self.keys[layer], self.values[layer])))
        if not single.all():
            looks.append((self._rows(~mask), self._several(pages.select(~single), new[~single])))
        look = side_by_side(looks)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(k, v, self.keys[layer], self.values[layer], slots)
            return look(layer, q, k, v)

        return attend

    def _rows(self, mask: np.ndarray) -> slice | Tensor:
        """The rows of a step for which mask[T] is true: a slice, whose tensors are views, where they are
        neighbours.
        """
        rows = np.flatnonzero(mask)
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return on_device(self.memory.device, rows)[0]

    def _several(self, pages: Pages, new: np.ndarray) -> Attend:
        """Sequences with several new tokens each, by the varlen kernel."""
        query_start = (0, *np.cumsum(new).tolist())
        if (new == pages.lens).all():  # prompts from their start: all they see was computed just now
            spans = Spans(query_start, query_start)
            return lambda layer, q, k, v: self._kernel(q, k, v, spans)
        if self._prefill is not None:
            plan = self._prefill(pages, query_start, self.keys[0])
            return lambda layer, q, k, v: plan(q, self.keys[layer], self.values[layer])
        spans = Spans(query_start, (0, *np.cumsum(pages.lens).tolist()))
        (places,) = on_device(self.memory.device, pages.all_places())

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = gather(self.keys[layer], places), gather(self.values[layer], places)
            return self._kernel(q, keys, values, spans)

        return attend
