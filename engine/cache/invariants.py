"""Checks what must always hold of a paged cache, for tests. Part 12.

The checks count the references to each block anew, from the tables, so they are slow.
"""

from collections import Counter

from engine.cache.allocation import Allocation
from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.paged import PagedCache
from engine.cache.prefix import root
from engine.requests.request import Request
from engine.requests.step import Step


class InvariantError(AssertionError):
    """Something that must always hold of the cache does not hold. The message says what."""


class Invariants:
    """Checks one cache, time after time. Each check compares the tables with those of the last check."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        # By sequence id: the table at the last check, and its blocks then. The table itself is kept because
        # `trim` replaces a table, and the new table may be shorter.
        self._last_tables: dict[str, tuple[BlockTable, list[int]]] = {}

    def check(self, step: Step | None = None) -> None:
        """Check all sequences. With a `step` that is about to run, also check that the step writes only
        blocks that its sequences do not share. Raises InvariantError.
        """
        allocations, swap = self.cache.allocations, self.cache.swap
        held = [allocation.held for allocation in allocations.values()]
        _check_counts("the cache", self.cache.blocks, held)
        _check_counts("the swap space", swap.blocks, [swapped.blocks for swapped in swap.sequences.values()])
        for seq_id, allocation in allocations.items():
            _must(seq_id not in swap, f"{seq_id} is here and in the swap space")
            self._check_allocation(seq_id, allocation)
            self._last_tables[seq_id] = allocation.table, allocation.table.blocks.tolist()
        for seq_id in self._last_tables.keys() - allocations.keys():
            del self._last_tables[seq_id]
        if step is not None:
            self._check_step(step)

    def _check_allocation(self, seq_id: str, allocation: Allocation) -> None:
        """Check a sequence's table:

        - Since the last check, it has grown at its end only, unless `trim` has replaced it.
        - No block is in it twice.
        - It has room for the committed tokens.
        - Committed tokens fill each of its blocks that is shared.
        """
        table, P = allocation.table.blocks.tolist(), self.cache.block_size
        if seq_id in self._last_tables:
            last_table, last_blocks = self._last_tables[seq_id]
            _must(
                last_table is not allocation.table or table[: len(last_blocks)] == last_blocks,
                f"{seq_id}'s table was {last_blocks}, now {table}: tables only grow",
            )
        held = allocation.held
        _must(len(set(held)) == len(held), f"a block stands twice in {seq_id}'s table {table}")
        num_committed, first_held = allocation.num_committed, allocation.num_blocks_given_back
        _must(num_committed <= len(table) * P, f"{seq_id} has {num_committed} tokens in {len(table)} blocks")
        for i, block in enumerate(table[first_held:], first_held):
            if self.cache.blocks.references[block] > 1:
                _must(
                    (i + 1) * P <= num_committed, f"block {block} is shared, and {seq_id} has not filled it"
                )

    def _check_step(self, step: Step) -> None:
        """Check that each sequence of the step writes where its table says, and only into blocks that no
        other sequence reads now or can find, and that the prefix cache knows its blocks for its own tokens.
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
            self._check_chain(request, allocation)

    def _check_chain(self, request: Request, allocation: Allocation) -> None:
        """Check that each known block of the request is known for the tokens that it holds, and for the
        blocks before it.
        """
        P, parent = self.cache.block_size, root(request.adapter, request.cache_salt)
        for i, prefix in enumerate(allocation.chain):
            expected = tuple(request.token_ids[i * P : (i + 1) * P])
            _must(prefix.token_ids == expected, f"block {i} of {request.id} is known for other tokens")
            _must(prefix.parent == parent, f"block {i} of {request.id} is known after another beginning")
            parent = prefix


def _check_counts(where: str, manager: BlockManager, tables: list[list[int]]) -> None:
    """Check that each block is either free or in a table, and has as many references as tables name it.
    `where` is for the message.
    """
    num_tables = Counter(block for table in tables for block in table)  # by block: the tables that name it
    for block, references in enumerate(manager.references):
        _must(
            references == num_tables[block],
            f"{where}: block {block} has {references} references, and stands in {num_tables[block]} tables",
        )
        is_free = block in manager.free_queue
        _must(
            is_free == (references == 0),
            f"{where}: block {block} has {references} references and is {'' if is_free else 'not '}free",
        )
    num_free, num_used = len(manager.free_queue), len(num_tables)
    _must(
        num_free + num_used == manager.num_blocks,
        f"{where}: {num_free} free blocks and {num_used} in use are not {manager.num_blocks} in all",
    )


def _must(holds: bool, message: str) -> None:
    """Raise InvariantError with this message unless `holds` is true."""
    if not holds:
        raise InvariantError(message)
