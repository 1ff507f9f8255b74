"""Each invariant, broken on purpose: the check that runs at every step of the other tests sees it."""

from dataclasses import replace

import pytest

from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.invariants import InvariantError
from tests.part12.pages import admitted, paged, sequence, table, take


def scene(**options):
    """(cache, its invariants, two sequences that share two blocks, a child that shares them too)"""
    cache = paged(16, num_swap_blocks=8, preemption_mode="swap", **options)
    watch = cache.invariants
    a = admitted(cache, sequence("a", "1234567890"))
    b = admitted(cache, sequence("b", "12345678ab"))
    child = admitted(cache, sequence("a/1", "1234567890", parent=a))
    watch.check()
    return cache, watch, a, b, child


def next_step(cache, *seqs):
    for seq in seqs:
        seq.token_ids.append(7)
    return take(cache, *((seq, 1) for seq in seqs))


def test_nothing_is_broken_as_it_stands():
    cache, watch, a, b, child = scene()
    watch.check(next_step(cache, a, b, child))
    cache.preempt(b)
    cache.release(a)
    watch.check()


def forgets_a_reference(cache, a, b, child):
    cache.blocks.references[table(cache, a)[0]] -= 1


def leaks_a_block(cache, a, b, child):
    cache.blocks.free_queue.popitem()


def frees_a_block_in_use(cache, a, b, child):
    cache.blocks.free_queue[table(cache, b)[2]] = None


def keeps_a_freed_block_out_of_the_queue(cache, a, b, child):
    cache.release(b)
    del cache.blocks.free_queue[next(iter(cache.blocks.free_queue))]


def replaces_a_block_of_a_table(cache, a, b, child):
    (fresh,) = cache.blocks.allocate(1)
    cache.blocks.free([table(cache, b)[2]])
    cache.allocations["b"].table._numbers[2] = fresh


def cuts_a_table(cache, a, b, child):
    cache.blocks.free([table(cache, b)[2]])
    cache.allocations["b"].table._length = 2


def takes_a_block_twice(cache, a, b, child):
    cache.blocks.fork([table(cache, b)[2]])
    cache.allocations["b"].table.append([table(cache, b)[2]])


def shares_a_block_that_is_not_full(cache, a, b, child):
    block = table(cache, a)[2]
    cache.blocks.fork([block])
    cache.blocks.free([table(cache, child)[2]])
    fresh = BlockTable()
    fresh.append([*table(cache, child)[:2], block])
    cache.allocations["a/1"].table = fresh


def swaps_and_keeps(cache, a, b, child):
    cache.swap.put("b", num_blocks=3, num_tokens=10, num_draft_tokens=0)


def commits_what_it_has_no_room_for(cache, a, b, child):
    cache.allocations["b"].num_committed = 13


def frees_a_block_that_there_is_not(cache, a, b, child):
    cache.blocks.free_queue[cache.num_blocks] = None


def loses_a_block_of_the_swap_space(cache, a, b, child):
    cache.preempt(b)
    cache.swap.sequences.clear()


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (forgets_a_reference, "references, and stands in"),
        (leaks_a_block, "is not free"),
        (frees_a_block_in_use, "1 references and is free"),
        (keeps_a_freed_block_out_of_the_queue, "is not free"),
        (replaces_a_block_of_a_table, "tables only grow"),
        (cuts_a_table, "tables only grow"),
        (takes_a_block_twice, "stands twice in b's table"),
        (shares_a_block_that_is_not_full, "is shared, and a has not filled it"),
        (swaps_and_keeps, "b is here and in the swap space"),
        (commits_what_it_has_no_room_for, "b has 13 tokens in 3 blocks"),
        (frees_a_block_that_there_is_not, "are not 16 in all"),
        (loses_a_block_of_the_swap_space, "the swap space: block"),
    ],
)
def test_a_broken_count_or_table_is_seen(breaks, words):
    cache, watch, *seqs = scene()
    breaks(cache, *seqs)
    if breaks is shares_a_block_that_is_not_full:
        watch._last_tables.clear()  # else the replaced table is seen first
    with pytest.raises(InvariantError, match=words):
        watch.check()


def writes_a_shared_block(cache, a, b, child):
    child.num_computed_tokens = 5


def writes_a_block_that_others_may_find(cache, a, b, child):
    cache.release(a), cache.release(child)
    b.num_computed_tokens = 7


def is_known_for_other_tokens(cache, a, b, child):
    b.token_ids[1] = 99


def is_known_after_another_beginning(cache, a, b, child):
    cache.allocations["b"].chain[1] = (
        cache.allocations["b"].chain[1].__class__(None, cache.allocations["b"].chain[1].token_ids)
    )


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (writes_a_shared_block, r"a/1 writes block \d+, which is shared"),
        (writes_a_block_that_others_may_find, r"b writes block \d+, which others may find"),
        (is_known_for_other_tokens, "block 0 of b is known for other tokens"),
        (is_known_after_another_beginning, "block 1 of b is known after another beginning"),
    ],
)
def test_a_step_that_must_not_run_is_seen(breaks, words):
    cache, watch, a, b, child = scene()
    breaks(cache, a, b, child)
    step = next_step(cache, child if breaks is writes_a_shared_block else b)
    with pytest.raises(InvariantError, match=words):
        watch.check(step)


def loses_its_room(cache, b, step):
    cache.allocations["b"].num_committed = 8
    cache.trim(b, 8)


def goes_elsewhere(cache, b, step):
    step.batch = replace(step.batch, slots=step.batch.slots + 4)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (loses_its_room, "b has no room for its 11 tokens"),
        (goes_elsewhere, "b's tokens 10 to 11 go to .*, which its table .* does not say"),
    ],
)
def test_a_record_that_the_plan_does_not_bear_out_is_seen(breaks, words):
    cache, watch, _a, b, _child = scene()
    step = next_step(cache, b)
    breaks(cache, b, step)
    with pytest.raises(InvariantError, match=words):
        watch.check(step)


def forgetful_free(self, blocks):
    for block in blocks:
        self.references[block] -= 1


def eager_free(self, blocks):
    for block in blocks:
        self.references[block] -= 1
        self.free_queue[block] = None


def stingy_fork(self, blocks):
    for block in blocks:
        self.free_queue.pop(block, None)


@pytest.mark.parametrize(
    ("name", "mutation"), [("free", forgetful_free), ("free", eager_free), ("fork", stingy_fork)]
)
def test_a_block_manager_that_counts_wrongly_is_seen_in_use(monkeypatch, name, mutation):
    monkeypatch.setattr(BlockManager, name, mutation)
    with pytest.raises((InvariantError, ValueError, KeyError)):  # noqa: PT012
        cache, watch, a, _b, _child = scene()
        cache.release(a)
        watch.check()


def test_a_fork_that_copies_nothing_is_seen(monkeypatch):
    """Copy-on-write without the copy: the child would write into its parent's block."""
    cache = paged(16)
    a = admitted(cache, sequence("a", "1234567890"))
    monkeypatch.setattr(cache.blocks, "allocate", lambda count, after=None: (cache.blocks.fork([2]), [2])[1])
    child = sequence("a/1", "1234567890", parent=a)
    child.num_computed_tokens = cache.admit(child)
    with pytest.raises(InvariantError, match="shared"):
        cache.invariants.check(take(cache, (child, 1)))
