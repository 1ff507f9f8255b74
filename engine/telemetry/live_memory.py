"""The blocks of a cache as the web page /engine draws them: how many are free, in use and shared. Part 12.

The page draws at most MAX_CELLS cells. In a larger cache a cell stands for several neighbouring blocks, and
has the number of them in each state, so no block is left out. A copy is made in the engine's thread, by
copying lists; the counting is left to whoever reads the copy, in another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from engine.cache.manager import KVCacheManager
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.requests.request import Request

MAX_CELLS = 1024
MAX_TABLE = 64  # cells of one request's blocks


def cell_size(num_blocks: int) -> int:
    """How many neighbouring blocks a cell stands for; the last cell may stand for fewer."""
    return max(1, -(-num_blocks // MAX_CELLS))  # rounded up


@dataclass(frozen=True)
class BlocksCopy:
    """The blocks (or slots) of a cache, or of its swap space, at one moment. Any thread may read it."""

    references: list[int]  # [B]: how many sequences hold each block, or slot
    known: list[int]  # the blocks that a prefix cache can find

    def read(self) -> dict:
        """The blocks as JSON data. It counts the blocks in four states:

        - `used`: one sequence or more holds the block.
        - `shared`: two sequences or more hold it.
        - `known`: a prefix cache can find it.
        - `kept`: it is known, and no sequence holds it.

        `cells` has a list for each state, with the count of each cell. Its list `references` has for each
        cell the most sequences that hold one of its blocks.
        """
        references = np.array(self.references)
        is_known = np.zeros(len(references), dtype=bool)
        is_known[self.known] = True
        states = {
            "used": references > 0,
            "shared": references > 1,
            "known": is_known,
            "kept": is_known & (references == 0),
        }
        size = cell_size(len(references))
        starts = np.arange(0, len(references), size)  # the first block of each cell
        totals: dict[str, int] = {}
        cells: dict[str, list[int]] = {}
        for name, state in states.items():
            totals[name] = int(state.sum())
            cells[name] = np.add.reduceat(state, starts, dtype=int).tolist()
        cells["references"] = np.maximum.reduceat(references, starts).tolist()
        return {"total": len(references), "cell_size": size, **totals, "cells": cells}


@dataclass(frozen=True)
class MemoryCopy:
    """A cache at one moment. Any thread may read it."""

    unit: Literal["block", "slot", "token"]  # what the memory is given away in
    unit_tokens: int  # tokens for which such a unit has room
    tokens_held: int  # tokens for which sequences have room reserved; a shared block counts once
    tokens_total: int  # tokens for which the cache has room
    tokens_unused: int  # tokens for which sequences have room, but no keys and values yet
    blocks: BlocksCopy | None  # None for a cache that does not say which memory is whose
    swap: BlocksCopy | None = None  # None without a swap space

    def read(self) -> dict:
        """The memory as JSON data: the fields above, `blocks` and `swap` as `BlocksCopy.read` has them."""
        return {
            "unit": self.unit,
            "unit_tokens": self.unit_tokens,
            "tokens_held": self.tokens_held,
            "tokens_total": self.tokens_total,
            "tokens_unused": self.tokens_unused,
            "blocks": None if self.blocks is None else self.blocks.read(),
            "swap": None if self.swap is None else self.swap.read(),
        }


class TableCopy(NamedTuple):
    """Where the tokens of one request lie."""

    num_blocks: int  # how many blocks, or slots, it holds
    num_given_back: int  # blocks before them that it has given back: no layer sees them (Extension C)
    cells: list[int]  # the cells of its blocks, in the order of its tokens, each once, at most MAX_TABLE


def copy_memory(cache: KVCacheManager, running: Sequence[Request]) -> MemoryCopy:
    """A copy of what a cache holds for the `running` requests. Of a cache that has neither pages nor slots,
    only the totals are known. Must be called in the engine's thread, between two steps.
    """
    usage = cache.usage()
    num_computed = sum(request.num_computed_tokens for request in running)
    memory = MemoryCopy(
        unit="token",
        unit_tokens=1,
        tokens_held=usage.tokens_held,
        tokens_total=usage.tokens_total,
        tokens_unused=max(0, usage.tokens_held - num_computed),
        blocks=None,
    )
    if isinstance(cache, PagedCache):
        num_blocks = sum(len(cache.allocations[request.id].table) for request in running)
        swap = None
        if cache.swap.blocks.num_blocks:
            swap = BlocksCopy(cache.swap.blocks.references.copy(), known=[])
        return replace(
            memory,
            unit="block",
            unit_tokens=cache.block_size,
            tokens_unused=max(0, num_blocks * cache.block_size - num_computed),
            blocks=BlocksCopy(cache.blocks.references.copy(), cache.prefixes.blocks()),
            swap=swap,
        )
    if isinstance(cache, SlotCache):
        references = [0] * cache.num_slots
        for slot in cache.slot_of.values():
            references[slot] = 1
        blocks = BlocksCopy(references, known=[])
        return replace(memory, unit="slot", unit_tokens=cache.slot_tokens, blocks=blocks)
    return memory


def copy_table(cache: KVCacheManager, request: Request) -> TableCopy:
    """Where the tokens of a request lie now: nowhere, if it holds no memory."""
    if isinstance(cache, PagedCache) and request.id in cache.allocations:
        allocation = cache.allocations[request.id]
        held = allocation.table.blocks[allocation.num_blocks_given_back :]
        cells = dict.fromkeys((held // cell_size(cache.num_blocks)).tolist())
        return TableCopy(len(held), allocation.num_blocks_given_back, list(cells)[:MAX_TABLE])
    if isinstance(cache, SlotCache) and request.id in cache.slot_of:
        return TableCopy(1, 0, [cache.slot_of[request.id] // cell_size(cache.num_slots)])
    return TableCopy(0, 0, [])
