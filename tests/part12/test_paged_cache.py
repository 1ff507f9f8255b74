"""Pages under many sequences: what each holds, what they share, and that nobody writes what is shared."""

import random

import pytest

from tests.part12.pages import admitted, make_copies, paged, sequence, step, table, take, tokens_in_pages


def test_a_sequence_holds_what_it_needs_rounded_up_to_a_block():
    cache, seq = paged(10), sequence("a", range(9))
    assert cache.admit(seq) == 0
    assert table(cache, seq) == [], (
        "admit takes what it finds and no more: reserve takes blocks as steps need them"
    )
    for num_tokens, blocks in [(1, 1), (4, 1), (5, 2), (9, 3), (2, 3)]:
        assert cache.reserve(seq, num_tokens)
        assert len(table(cache, seq)) == blocks
    usage = cache.usage()
    assert (usage.num_sequences, usage.tokens_held, usage.tokens_total) == (1, 12, 40)
    cache.release(seq)
    assert cache.usage().tokens_held == 0


def test_a_reservation_that_is_refused_changes_nothing():
    cache, a, b = paged(4), sequence("a"), sequence("b")
    cache.admit(a), cache.admit(b)
    assert cache.reserve(a, 9)
    assert not cache.reserve(b, 5)
    assert table(cache, b) == []
    assert cache.reserve(b, 4)


def test_what_was_reserved_for_more_can_be_given_back():
    cache, seq = paged(4), sequence("a", range(5))
    cache.admit(seq)
    assert cache.reserve(seq, 13)
    cache.invariants.check()
    first = table(cache, seq)[:2]
    cache.trim(seq, 5)
    cache.invariants.check()
    assert table(cache, seq) == first, "what its tokens need stays, in order"
    assert cache.usage().tokens_held == 8, "the rest is free for others"
    cache.trim(seq, 8)
    assert table(cache, seq) == first
    assert cache.reserve(seq, 9), "it may grow again"
    assert len(table(cache, seq)) == 3, "into a block that it has"
    cache.release(seq)
    assert cache.usage().tokens_held == 0


def test_tokens_are_written_at_their_places_whatever_the_blocks():
    cache, rng = paged(12), random.Random(0)
    seqs = [sequence(name, range(100 * i, 100 * i + 15)) for i, name in enumerate("abc")]
    for seq in seqs:
        seq.num_computed_tokens = cache.admit(seq)
    while open_ones := [seq for seq in seqs if seq.num_tokens_to_compute]:
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        step(cache, *((seq, rng.randint(1, seq.num_tokens_to_compute)) for seq in chosen))
        for seq in seqs:
            expected = seq.token_ids[: seq.num_computed_tokens]
            assert tokens_in_pages(cache, seq) == expected, (
                f"{seq.id}'s tokens lie in its table's blocks, in order"
            )


def test_a_query_sees_its_own_sequence_and_no_other():
    cache, a, b = paged(8), sequence("a", [100] * 6), sequence("b", [3, 5, 10, 2])
    admitted(cache, a)
    b.num_computed_tokens = cache.admit(b)
    means = [round(step(cache, (b, 1)).item(), 4) for _ in range(4)]
    assert means == [3, 4, 6, 5], "the means of 3; of 3 and 5; of 3, 5 and 10; of all four"


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (40, True), (41, False)])
def test_a_sequence_may_fill_the_whole_cache_and_no_more(num_tokens, fits):
    assert paged(10).fits(num_tokens) is fits


def test_who_finds_no_room_for_all_its_known_tokens_is_not_admitted():
    cache = paged(4)
    admitted(cache, sequence("a", range(5)))
    late = sequence("b", range(50, 59))
    assert cache.admit(late) is None, "9 tokens need 3 blocks, 2 are free: not now"
    assert cache.usage().num_sequences == 1, "who is not admitted holds nothing"
    assert cache.admit(sequence("c", range(50, 58))) == 0, "8 tokens need 2 blocks, 2 are free: it comes in"


# What is shared: beginnings that the prefix cache knows.


def test_a_known_beginning_is_not_computed_again():
    cache, a, b = paged(10), sequence("a", "a long beginning"), sequence("b", "a long beginner")
    admitted(cache, a)
    assert cache.admit(b) == 12, "'a long begin' is 3 full blocks that are known"
    assert table(cache, b) == table(cache, a)[:3], "what is known is shared, not copied"
    assert cache.blocks.references[table(cache, b)[0]] == 2, (
        "a shared block has a reference of each of its owners"
    )
    assert cache.allocations["b"].num_committed == 12, "what was found is committed, by those who computed it"
    assert len(cache.allocations["b"].chain) == 3, (
        "what was found has a chain, which the newcomer goes on with: its next full block is known behind it"
    )
    b.num_computed_tokens = 12
    step(cache, (b, 3))
    assert tokens_in_pages(cache, b) == b.token_ids
    assert tokens_in_pages(cache, a) == a.token_ids
    assert (cache.queried_tokens, cache.hit_tokens) == (16 + 15, 12), (
        "all known tokens of who is admitted are queried, 16 and 15, and those found are hits, 12"
    )


def test_the_last_token_is_computed_even_if_all_blocks_are_known():
    cache = paged(10)
    admitted(cache, sequence("a", "12345678"))
    assert cache.admit(sequence("b", "12345678")) == 4, "at most all tokens but one are there already"


def test_a_beginning_is_found_after_its_owner_has_left():
    cache, a = paged(4), sequence("a", "12345678")
    admitted(cache, a)
    cache.release(a)
    assert cache.usage().tokens_held == 0
    b = admitted(cache, sequence("b", "123456789"))
    assert cache.hit_tokens == 8
    assert tokens_in_pages(cache, b) == b.token_ids


def test_what_was_forgotten_is_found_by_nobody_and_nothing_is_forgotten_while_somebody_runs():
    cache, a = paged(4), sequence("a", "12345678")
    admitted(cache, a)
    assert not cache.reset_prefix_cache(), "its blocks are in use"
    cache.release(a)
    assert cache.reset_prefix_cache()
    b = admitted(cache, sequence("b", "123456789"))
    assert cache.hit_tokens == 0
    cache.release(b)
    assert cache.admit(sequence("c", "123456789")) == 8, "what is computed afterwards is found again"


def test_blocks_are_given_away_when_memory_is_needed_and_the_oldest_goes_first():
    cache = paged(5)
    for name in ("old", "new"):
        cache.release(admitted(cache, sequence(name, name * 3)))  # 2 full blocks each, of 9 letters
    admitted(cache, sequence("c", "xxxxxxxx"))
    assert cache.admit(sequence("old again", "old" * 3)) == 4, "one of its two blocks went, the last one"
    assert cache.admit(sequence("new again", "new" * 3)) is None, (
        "a found block that nobody has is taken from the free ones: 2 are free and found, a third is needed"
    )


def test_what_is_known_but_free_counts_as_taken_once_it_is_found():
    """Two free blocks, both found: there is no third for the last token."""
    cache, a = paged(3), sequence("a", "12345678")
    cache.release(admitted(cache, a))
    admitted(cache, sequence("b", "abc"))
    assert cache.admit(sequence("c", "123456789")) is None, (
        "a found block that nobody has is taken from the free ones: 2 are free and found, a third is needed"
    )
    assert cache.admit(sequence("d", "1234")) == 0


def test_only_what_is_committed_is_shared():
    """A step may fail, or not have landed: what it was to compute is not there."""
    cache, a = paged(10), sequence("a", "1234567890")
    a.num_computed_tokens = cache.admit(a)
    cache.reserve(a, 10)
    take(cache, (a, 10))
    assert cache.admit(sequence("b", "1234567890")) == 0
    cache.commit(a, 5)
    assert cache.admit(sequence("c", "1234567890")) == 4


def test_a_block_is_known_with_its_last_token():
    cache, a = paged(10), sequence("a", "1234567890")
    a.num_computed_tokens = cache.admit(a)
    step(cache, (a, 4))
    assert cache.admit(sequence("b", "1234567890")) == 4


def test_another_adapter_or_salt_finds_nothing():
    cache = paged(20)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.admit(sequence("b", "1234567890", cache_salt="b's own")) == 0
    assert cache.admit(sequence("c", "1234567890", adapter="poetry")) == 0
    assert cache.admit(sequence("d", "1234567890")) == 8


def test_who_wants_every_row_finds_nothing():
    """Its prompt's log probabilities come from rows that a hit would leave out."""
    cache = paged(20)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.admit(sequence("b", "1234567890", every_row=True)) == 0, (
        "who wants every row computes every row"
    )


@pytest.mark.parametrize("own", [{"adapter": "poetry"}, {"cache_salt": "a's own"}])
def test_what_was_computed_with_an_adapter_or_a_salt_is_found_with_it_alone(own):
    cache = paged(10)
    admitted(cache, sequence("a", "1234567890", **own))
    assert cache.admit(sequence("b", "1234567890")) == 0, "a's adapter and salt are part of what it left"
    assert cache.admit(sequence("c", "1234567890", **own)) == 8


def test_without_prefix_caching_nothing_is_found():
    cache = paged(10, enable_prefix_caching=False)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.admit(sequence("b", "1234567890")) == 0


def test_what_a_failed_sequence_computed_is_not_found():
    """It may be why it failed: numbers that are none, say."""
    cache, a = paged(10), sequence("a", "1234567890")
    admitted(cache, a)
    a.error = "ArithmeticError"
    cache.release(a)
    assert cache.admit(sequence("b", "1234567890")) == 0, (
        "a failed sequence leaves nothing behind that others find"
    )


# Forks: samples of one request.


def test_a_child_waits_while_its_parents_prompt_is_computed():
    cache, a = paged(10), sequence("a", "1234567890")
    child = sequence("a/1", "1234567890", parent=a)
    admitted(cache, a, compute=False)
    assert cache.admit(child) is None, "the parent has computed nothing yet: not now"
    for n in (4, 3):
        step(cache, (a, n))
        assert cache.admit(child) is None, "the parent is in the middle of its prompt: not now"
    assert cache.usage().num_sequences == 1
    step(cache, (a, 3))
    assert cache.admit(child) == 9, "all but the last token are there"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_child_shares_full_blocks_and_has_a_copy_of_the_one_it_will_write(prefix_caching):
    cache = paged(10, enable_prefix_caching=prefix_caching)
    a = admitted(cache, sequence("a", "1234567890"))
    a.token_ids.append(ord("x"))
    child = sequence("a/1", "1234567890", parent=a)
    child.num_computed_tokens = cache.admit(child)
    assert child.num_computed_tokens == 9
    assert table(cache, child)[:2] == table(cache, a)[:2], "the prompt's full blocks are shared"
    assert table(cache, child)[2] != table(cache, a)[2], "the block both would write is not shared but copied"
    assert cache.blocks.references[table(cache, a)[2]] == 1, (
        "the block that was copied keeps one reference, its parent's: only full blocks are shared"
    )
    make_copies(cache)
    copied = cache.memory.keys[0][table(cache, child)].flatten()[:9].tolist()
    assert copied == child.token_ids[:9], "the copy holds what the parent's block holds"
    step(cache, (a, 1), (child, 1))
    child.token_ids.append(ord("y"))
    step(cache, (child, 1))
    assert tokens_in_pages(cache, a) == [*map(ord, "1234567890x")]
    assert tokens_in_pages(cache, child) == [*map(ord, "1234567890y")]


def test_a_copy_takes_a_block_too():
    cache = paged(4)
    a = admitted(cache, sequence("a", "1234567890"))
    child = sequence("a/1", "1234567890yyy", parent=a)
    assert cache.admit(child) is None, (
        "13 tokens need 4 blocks, 2 full ones are shared, the copy of the third takes one: 2 needed, 1 free"
    )


def test_a_childs_chain_is_its_own_from_where_it_parts():
    cache = paged(10)
    a = admitted(cache, sequence("a", "12345678"))
    child = admitted(cache, sequence("a/1", "12345678", parent=a))
    for seq, words in ((a, "xxxx"), (child, "yyyy")):
        seq.token_ids += map(ord, words)
        step(cache, (seq, 4))
    assert cache.admit(sequence("b", "12345678yyyyz")) == 12, (
        "parent and child say different words: each full block joins the chain of who wrote it"
    )


def test_what_a_draft_model_has_read_of_a_found_beginning_need_not_be_read_again():
    cache, a, b = paged(10), sequence("a", "123456789012x"), sequence("b", "123456789012y")
    admitted(cache, a)
    cache.prefixes.mark_draft_computed(table(cache, a)[:2])
    assert cache.admit(b) == 12
    progress = cache.draft_progress.get("b")
    assert progress is not None, "who is admitted has a DraftProgress in `draft_progress` (Part 16 reads it)"
    assert progress.num_tokens == 8, "3 blocks are found, of which a draft model has read 2: 8 tokens"


def test_a_child_whose_parent_has_left_begins_like_anyone_else():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    cache.release(a)
    child = sequence("a/1", "1234567890", parent=a)
    assert cache.admit(child) == 8, "the prefix cache still knows the parent's full blocks"


def test_a_child_that_has_said_something_shares_what_it_has_in_common_with_its_parent():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890xxxxxx"))
    child = admitted(cache, sequence("a/1", "1234567890yyyyyy", parent=a))
    assert cache.hit_tokens == 10
    assert tokens_in_pages(cache, child) == child.token_ids


def test_a_child_that_has_said_all_its_parent_said_does_not_wait_for_it():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    a.token_ids.append(ord("x"))  # known, and not computed yet
    child = sequence("a/1", "1234567890xyz", parent=a)
    assert cache.admit(child) == 10


def test_a_parent_may_leave_before_its_children():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    children = [admitted(cache, sequence(f"a/{i}", "1234567890", parent=a)) for i in (1, 2)]
    assert cache.blocks.references[table(cache, a)[0]] == 3
    cache.release(a)
    filler = admitted(cache, sequence("b", "abcdefgh"))
    for seq in (*children, filler):
        assert tokens_in_pages(cache, seq) == seq.token_ids
        cache.release(seq)
    assert cache.usage().tokens_held == 0


def test_who_was_preempted_needs_room_for_what_it_has_said_too():
    cache = paged(4)
    admitted(cache, sequence("a", range(5)))
    back = sequence("b", range(50, 59))
    back.num_prompt_tokens = 4
    assert cache.admit(back) is None, "a prompt of 4 and 5 tokens said: 9 known tokens need 3 blocks"
