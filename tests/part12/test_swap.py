"""Preempted sequences: what was computed goes to the CPU's memory and comes back, or is computed again."""

import pytest
import torch

from engine.cache.paged import SWAP_FROM
from tests.part12.pages import P, admitted, make_copies, paged, sequence, table, tokens_in_pages


def swapping(num_blocks=8, swap_blocks=8, mode="swap", **options):
    return paged(num_blocks, num_swap_blocks=swap_blocks, preemption_mode=mode, **options)


def back(cache, seq):
    seq.num_computed_tokens = cache.admit(seq)
    make_copies(cache)
    return seq.num_computed_tokens


def test_what_comes_back_is_what_left():
    cache = swapping()
    seq = admitted(cache, sequence("a", "1234567890"))
    kept = cache.memory.memory[:, :, table(cache, seq)].clone()
    cache.preempt(seq)
    assert cache.usage().tokens_held == 0, "who is swapped out holds no blocks"
    other = admitted(cache, sequence("b", "something else altogether!"))  # writes over what a left
    cache.release(other)
    seq.token_ids.append(7)
    assert back(cache, seq) == 10, "who was swapped out starts behind what comes back"
    assert torch.equal(cache.memory.memory[:, :, table(cache, seq)], kept)
    assert cache.swap.blocks.num_free == 8, "its room in the swap space is free again"
    assert tokens_in_pages(cache, seq, 10) == seq.token_ids[:10]


def test_only_what_is_committed_is_swapped():
    """The rest was written by a step that failed, or that is still in flight."""
    cache, seq = swapping(), sequence("a", "1234567890")
    seq.num_computed_tokens = cache.admit(seq)
    cache.reserve(seq, 10)
    cache.commit(seq, 6)
    cache.preempt(seq)
    assert len(cache.swap.sequences["a"].blocks) == 2
    assert back(cache, seq) == 6


def test_it_waits_until_there_is_room_for_all_its_known_tokens():
    cache = swapping(num_blocks=4)
    seq = admitted(cache, sequence("a", "12345678"))
    cache.preempt(seq)
    other = admitted(cache, sequence("b", "xyz12"))
    seq.token_ids.append(9)
    assert cache.admit(seq) is None, "9 tokens need 3 blocks, 2 are free: not now"
    assert "a" in cache.swap, "what waits is still there"
    cache.release(other)
    assert back(cache, seq) == 8


def test_a_full_swap_space_means_computing_again():
    cache = swapping(swap_blocks=2, enable_prefix_caching=False)
    a, b = admitted(cache, sequence("a", "12345678")), admitted(cache, sequence("b", "abc"))
    cache.preempt(a)
    cache.preempt(b)
    assert "b" not in cache.swap
    for seq in (a, b):
        seq.token_ids.append(9)
    assert (back(cache, a), back(cache, b)) == (8, 0)
    assert cache.num_swapped == 1


def test_who_leaves_while_swapped_out_leaves_the_swap_space():
    cache = swapping()
    seq = admitted(cache, sequence("a", "12345678"))
    cache.preempt(seq)
    cache.release(seq)
    cache.release(seq)
    assert cache.swap.blocks.num_free == 8


def test_who_wants_every_row_is_computed_again():
    """Its prompt's log probabilities were forgotten with the rest."""
    cache = swapping()
    seq = admitted(cache, sequence("a", "12345678", every_row=True))
    cache.preempt(seq)
    seq.token_ids.append(9)
    assert back(cache, seq) == 0


@pytest.mark.parametrize(
    ("mode", "tokens", "swapped"),
    [
        ("recompute", 100, False),
        ("swap", 1, True),
        (None, SWAP_FROM - 1, False),
        (None, SWAP_FROM, True),
    ],
)
def test_the_mode_says_who_is_swapped(mode, tokens, swapped):
    cache = swapping(40, 40, mode)
    seq = admitted(cache, sequence("a", range(tokens)))
    cache.preempt(seq)
    assert ("a" in cache.swap) is swapped
    assert cache.num_swapped == swapped


def test_shared_blocks_may_be_swapped_by_one_and_used_by_the_other():
    cache = swapping()
    a = admitted(cache, sequence("a", "1234567890"))
    child = admitted(cache, sequence("a/1", "1234567890", parent=a))
    cache.preempt(child)
    assert tokens_in_pages(cache, a) == a.token_ids
    child.token_ids.append(5)
    assert back(cache, child) == 10
    assert tokens_in_pages(cache, child) == child.token_ids[:10]
    assert not set(table(cache, a)) & set(table(cache, child)), "what comes back is its own"


def test_what_came_back_can_be_found_by_others():
    cache = swapping(num_blocks=8)
    seq = admitted(cache, sequence("a", "12345678"))
    cache.preempt(seq)
    other = admitted(cache, sequence("b", range(8 * P - 1)))  # everything known is overwritten
    cache.release(other)
    seq.token_ids.append(9)
    back(cache, seq)
    cache.commit(seq, 8)
    assert cache.admit(sequence("c", "123456789")) == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preemption_mode": "drop"}, "preemption_mode='drop': accepted are 'recompute', 'swap' and None"),
        ({"preemption_mode": "swap"}, "preemption_mode='swap' needs swap blocks; num_swap_blocks=0"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        paged(4, **options)
