"""Checks what must always hold of a paged cache, for tests. Part 12.

The checks count everything anew and use no count of the cache's own, so they are slow.
"""

from collections import Counter

from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.paged import PagedCache
from engine.cache.prefix import root
from engine.requests.step import Step


class InvariantError(AssertionError):
    """Something that must always hold of the cache does not hold. The message says what."""


class Invariants:
    """Checks one cache, time after time. Each check compares the tables with those of the last check."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        # By sequence id: the table at the last check, and its blocks then. The table itself is kept because
        # `trim` replaces a table, and the new table may be shorter.
        self._before: dict[str, tuple[BlockTable, list[int]]] = {}

    def check(self, step: Step | None = None) -> None:
        """Check all sequences. With a `step` that is about to run, also check that the step writes only
        blocks that its sequences do not share. Raises InvariantError.
        """
        block_tables = {seq_id: allocation.table for seq_id, allocation in self.cache.allocations.items()}
        tables = {seq_id: table.blocks.tolist() for seq_id, table in block_tables.items()}
        held = {seq_id: allocation.held for seq_id, allocation in self.cache.allocations.items()}
        _check_counts("the cache", self.cache.blocks, list(held.values()))
        swap = self.cache.swap
        _check_counts("the swap space", swap.blocks, [swapped.blocks for swapped in swap.sequences.values()])
        for seq_id, table in tables.items():
            table_before, before = self._before.get(seq_id, (None, []))
            if table_before is block_tables[seq_id]:
                _must(
                    table[: len(before)] == before,
                    f"{seq_id}'s table was {before}, now {table}: tables only grow",
                )
            blocks = held[seq_id]
            _must(len(set(blocks)) == len(blocks), f"a block stands twice in {seq_id}'s table {table}")
            _must(seq_id not in swap, f"{seq_id} is here and in the swap space")
            self._check_allocation(seq_id, table)
        self._before = {seq_id: (block_tables[seq_id], table) for seq_id, table in tables.items()}
        if step is not None:
            self._check_step(step)

    def _check_allocation(self, seq_id: str, table: list[int]) -> None:
        """Check that a block that several sequences share is full of committed tokens in this sequence."""
        num_committed, P = self.cache.allocations[seq_id].num_committed, self.cache.block_size
        _must(num_committed <= len(table) * P, f"{seq_id} has {num_committed} tokens in {len(table)} blocks")
        num_given_back = self.cache.allocations[seq_id].num_given_back
        for i, block in enumerate(table[num_given_back:], num_given_back):
            if self.cache.blocks.references[block] > 1:
                _must(
                    (i + 1) * P <= num_committed, f"block {block} is shared, and {seq_id} has not filled it"
                )

    def _check_step(self, step: Step) -> None:
        """Check that the record's slots are those of each sequence's table, that no block that the step
        writes is shared or in the prefix cache, and that blocks in the prefix cache are there for their own
        tokens.
        """
        batch, P = step.batch, self.cache.block_size
        for s, request in enumerate(step.requests):
            allocation = self.cache.allocations[request.id]
            table, end = allocation.table.blocks.tolist(), batch.context_lens[s]
            start = end - batch.num_new_tokens(s)
            _must(end <= len(table) * P, f"{request.id} has no room for its {end} tokens")
            slots = batch.slots[batch.query_start[s] : batch.query_start[s + 1]].tolist()
            _must(
                slots == [table[i // P] * P + i % P for i in range(start, end)],
                f"{request.id}'s tokens {start} to {end} go to {slots}, which its table {table} does not say",
            )
            num_blocks = -(-end // P)  # rounded up
            for block in table[start // P : num_blocks]:
                _must(
                    self.cache.blocks.references[block] == 1,
                    f"{request.id} writes block {block}, which is shared",
                )
                _must(
                    block not in self.cache.prefixes,
                    f"{request.id} writes block {block}, which others may find",
                )
            parent = root(request.adapter, request.cache_salt)
            for i, prefix in enumerate(allocation.chain):
                expected = tuple(request.token_ids[i * P : (i + 1) * P])
                _must(prefix.token_ids == expected, f"block {i} of {request.id} is known for other tokens")
                _must(prefix.parent == parent, f"block {i} of {request.id} is known after another beginning")
                parent = prefix


def _check_counts(where: str, manager: BlockManager, tables: list[list[int]]) -> None:
    """Check that each block is either free or referred to, and has as many references as tables with it."""
    in_tables = Counter(block for table in tables for block in table)
    for block, references in enumerate(manager.references):
        _must(
            references == in_tables[block],
            f"{where}: block {block} has {references} references, and stands in {in_tables[block]} tables",
        )
        _must(
            (block in manager.free_queue) == (references == 0),
            f"{where}: block {block} has {references} references and is "
            f"{'' if block in manager.free_queue else 'not '}free",
        )
    num_free = len(manager.free_queue)
    _must(
        num_free + len(in_tables) == manager.num_blocks,
        f"{where}: {num_free} free blocks and {len(in_tables)} in use are not {manager.num_blocks} in all",
    )


def _must(holds: bool, message: str) -> None:
    """Raise InvariantError with this message unless `holds` is true."""
    if not holds:
        raise InvariantError(message)
