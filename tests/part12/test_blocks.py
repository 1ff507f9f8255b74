"""Blocks: who owns which, and in which order the free ones are given away."""

from engine.cache.blocks import BlockManager, BlockTable
from tests.part01.outcome import outcome


class Known(set):
    """Blocks whose contents may be looked for."""

    forget = set.discard


def test_blocks_are_given_away_in_order_each_with_one_owner():
    manager = BlockManager(5)
    assert manager.allocate(2) == [0, 1]
    assert manager.allocate(1) == [2]
    assert (manager.references, manager.num_free) == ([1, 1, 1, 0, 0], 2)


def test_more_blocks_than_are_free_are_refused_and_nothing_changes():
    manager = BlockManager(3)
    manager.allocate(2)
    assert manager.allocate(2) is None
    assert (manager.references, manager.num_free) == ([1, 1, 0], 1), "a refusal changes nothing"
    assert manager.allocate(0) == []


def test_a_freed_block_can_be_given_away_again():
    manager = BlockManager(3)
    blocks = manager.allocate(3)
    manager.free(blocks[1:])
    assert manager.references == [1, 0, 0], "free takes one reference from each block, and from no other"
    assert manager.num_free == 2, "a block that nobody refers to is free"
    assert sorted(manager.allocate(2)) == [1, 2]


def test_a_block_with_two_owners_is_free_only_when_both_have_left():
    manager = BlockManager(2)
    blocks = manager.allocate(1)
    manager.fork(blocks)
    assert manager.references[blocks[0]] == 2
    manager.free(blocks)
    assert manager.num_free == 1, "a block that somebody still refers to is not free"
    assert manager.references[blocks[0]] == 1
    manager.free(blocks)
    assert manager.num_free == 2


def test_a_block_freed_too_often_is_an_error_and_stands_in_the_queue_once():
    manager = BlockManager(2)
    blocks = manager.allocate(1)
    manager.free(blocks)
    error = outcome(manager.free, blocks)
    assert error == "ValueError: block 0 is free already", (
        f"who frees a block that nobody has is told: ValueError, 'block 0 is free already', not {error}"
    )
    assert (manager.references, list(manager.free_queue).count(0)) == ([0, 0], 1), (
        "who is refused takes no reference: none falls below 0"
    )


def test_blocks_without_contents_go_first_and_in_order():
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    manager.free(blocks)
    assert list(manager.free_queue) == [0, 1, 2, 3], (
        "a block with nothing to look for goes to the front of the queue; the last of a table first, so that "
        "the next owner gets them in order"
    )


def test_the_last_of_a_table_is_not_the_largest_number():
    manager = BlockManager(4)
    manager.allocate(4)
    manager.free([2, 0, 3])
    assert list(manager.free_queue) == [2, 0, 3], (
        "blocks come in a table's order, 2, 0, 3: the last joins first, and the next owner gets 2, 0, 3"
    )


def test_blocks_with_contents_go_last_and_a_sequences_beginning_last_of_all():
    known = Known()
    manager = BlockManager(4, known)
    blocks = manager.allocate(3)
    known |= {0, 1}
    manager.free(blocks)
    assert list(manager.free_queue) == [2, 3, 1, 0], (
        "block 2 holds nothing known: to the front. Blocks 1 and 0 do: to the end, the beginning (0) last, "
        "since it is kept longest"
    )


def test_a_block_freed_later_is_kept_longer():
    known = Known()
    manager = BlockManager(4, known)
    first, second = manager.allocate(2), manager.allocate(2)
    known |= {0, 1, 2, 3}
    manager.free(second)
    manager.free(first)
    assert [manager.allocate(1) for _ in range(4)] == [[3], [2], [1], [0]], (
        "the least recently used goes first"
    )


def test_contents_are_forgotten_when_a_block_is_given_away_and_not_before():
    known = Known()
    manager = BlockManager(2, known)
    blocks = manager.allocate(2)
    known |= set(blocks)
    manager.free(blocks)
    assert known == {0, 1}, "a free block still holds what it held"
    manager.allocate(1)
    assert known == {0}, "who gets a block writes over what it holds"


def test_a_sequences_next_block_is_the_one_right_behind_its_last():
    manager = BlockManager(8)
    assert manager.allocate(2) == [0, 1]
    assert manager.allocate(1) == [2]
    assert manager.allocate(2, after=1) == [3, 4], (
        "block 2 has an owner: the front of the queue, and on from it"
    )
    manager.free([2])
    assert manager.allocate(1, after=4) == [5], "the block right behind, not the front of the queue"
    assert manager.allocate(2, after=1) == [2, 6], "each follows the last one, if that can be"
    assert manager.allocate(1, after=7) == [7], "there is nothing behind the last block of all"


def test_contents_are_not_lost_for_the_sake_of_order():
    known = Known()
    manager = BlockManager(4, known)
    manager.allocate(3)
    known |= {1, 2}
    manager.free([1, 2])
    assert manager.allocate(1, after=0) == [3], "block 1 holds what may be looked for, block 3 nothing"
    assert known == {1, 2}
    assert manager.allocate(1, after=0) == [2], "all hold something: the least recently used goes"


def test_a_free_block_that_is_found_again_leaves_the_queue_from_the_middle():
    known = Known()
    manager = BlockManager(3, known)
    manager.allocate(3)
    known |= {0, 1, 2}
    manager.free([0, 1, 2])
    manager.fork([1])
    assert list(manager.free_queue) == [2, 0]
    assert 1 in known, "whoever finds it wants what it holds"
    assert manager.allocate(3) is None


def test_a_table_grows_at_its_end_and_nothing_else_changes():
    table = BlockTable()
    expected = []
    for blocks in ([3], [], [1, 4, 1, 5], list(range(40)), [9]):
        table.append(blocks)
        expected += blocks
        assert table.blocks.tolist() == expected
        assert len(table) == len(expected)
    assert table.last == 9


def test_the_blocks_of_one_call_follow_each_other_too():
    manager = BlockManager(5)
    manager.allocate(5)
    manager.free([3, 4])
    manager.free([0])
    assert list(manager.free_queue) == [0, 3, 4]
    assert manager.allocate(2, after=2) == [3, 4], "4 is right behind 3; 0, the front, is not"
