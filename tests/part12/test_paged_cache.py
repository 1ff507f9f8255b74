"""Pages under many sequences: what each holds, what they share, and that nobody writes what is shared."""

import random
from dataclasses import replace

import pytest
import torch

from engine.attention.dense import dense_attention
from engine.cache.invariants import Invariants
from engine.cache.single import CachedForward, SingleCache
from engine.executor import ModelForward
from engine.scheduling.scheduler import take
from tests.part06.fakes import CONFIG
from tests.part12.pages import admitted, paged, sequence, step, table, tokens_in_pages


def test_a_sequence_holds_what_it_needs_rounded_up_to_a_block():
    cache, seq = paged(10), sequence("a", range(9))
    assert cache.begin(seq) == 0
    assert table(cache, seq) == [], (
        "begin takes what it finds and no more: reserve takes blocks as steps need them"
    )
    for total, blocks in [(1, 1), (4, 1), (5, 2), (9, 3), (2, 3)]:
        assert cache.reserve(seq, total)
        assert len(table(cache, seq)) == blocks
    usage = cache.usage()
    assert (usage.num_sequences, usage.tokens_held, usage.tokens_total) == (1, 12, 40)
    cache.release(seq)
    assert cache.usage().tokens_held == 0


def test_a_reservation_that_is_refused_changes_nothing():
    cache, a, b = paged(4), sequence("a"), sequence("b")
    cache.begin(a), cache.begin(b)
    assert cache.reserve(a, 9)
    assert not cache.reserve(b, 5)
    assert table(cache, b) == []
    assert cache.reserve(b, 4)


def test_what_was_reserved_for_more_can_be_given_back():
    cache, one = paged(4), sequence("a", range(5))
    watch = Invariants(cache)
    cache.begin(one)
    assert cache.reserve(one, 13)
    watch.check()
    first = table(cache, one)[:2]
    cache.trim(one, 5)
    watch.check()
    assert table(cache, one) == first, "what its tokens need stays, in order"
    assert cache.usage().tokens_held == 8, "the rest is free for others"
    cache.trim(one, 8)
    assert table(cache, one) == first
    assert cache.reserve(one, 9), "it may grow again"
    assert len(table(cache, one)) == 3, "into a block that it has"
    cache.release(one)
    assert cache.usage().tokens_held == 0


def test_tokens_are_written_at_their_places_whatever_the_blocks():
    cache, rng = paged(12), random.Random(0)
    seqs = [sequence(name, range(100 * i, 100 * i + 15)) for i, name in enumerate("abc")]
    for seq in seqs:
        seq.num_computed_tokens = cache.begin(seq)
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
    b.num_computed_tokens = cache.begin(b)
    means = [round(step(cache, (b, 1)).item(), 4) for _ in range(4)]
    assert means == [3, 4, 6, 5], "the means of 3; of 3 and 5; of 3, 5 and 10; of all four"


@pytest.mark.parametrize(("total", "fits"), [(1, True), (40, True), (41, False)])
def test_a_sequence_may_fill_the_whole_cache_and_no_more(total, fits):
    assert paged(10).fits(total) is fits


def test_who_finds_no_room_for_all_its_known_tokens_is_not_admitted():
    cache = paged(4)
    admitted(cache, sequence("a", range(5)))
    late = sequence("b", range(50, 59))
    assert cache.begin(late) is None, "9 tokens need 3 blocks, 2 are free: not now"
    assert cache.usage().num_sequences == 1, "who is not admitted holds nothing"
    assert cache.begin(sequence("c", range(50, 58))) == 0


# What is shared: beginnings that the prefix cache knows.


def test_a_known_beginning_is_not_computed_again():
    cache, a, b = paged(10), sequence("a", "a long beginning"), sequence("b", "a long beginner")
    admitted(cache, a)
    assert cache.begin(b) == 12, "'a long begin' is 3 full blocks that are known"
    assert table(cache, b) == table(cache, a)[:3], "what is known is shared, not copied"
    assert cache.blocks.references[table(cache, b)[0]] == 2, (
        "a shared block has a reference of each of its owners"
    )
    b.num_computed_tokens = 12
    step(cache, (b, 3))
    assert tokens_in_pages(cache, b) == b.token_ids
    assert tokens_in_pages(cache, a) == a.token_ids
    assert (cache.queried_tokens, cache.hit_tokens) == (16 + 15, 12)


def test_the_last_token_is_computed_even_if_all_blocks_are_known():
    cache = paged(10)
    admitted(cache, sequence("a", "12345678"))
    assert cache.begin(sequence("b", "12345678")) == 4, "at most all tokens but one are there already"


def test_a_beginning_is_found_after_its_owner_has_left():
    cache, a = paged(4), sequence("a", "12345678")
    admitted(cache, a)
    cache.release(a)
    assert cache.usage().tokens_held == 0
    b = admitted(cache, sequence("b", "123456789"))
    assert cache.hit_tokens == 8
    assert tokens_in_pages(cache, b) == b.token_ids


def test_blocks_are_given_away_when_memory_is_needed_and_the_oldest_goes_first():
    cache = paged(5)
    for name in ("old", "new"):
        cache.release(admitted(cache, sequence(name, name * 3)))  # 2 full blocks each, of 9 letters
    admitted(cache, sequence("c", "xxxxxxxx"))
    assert cache.begin(sequence("old again", "old" * 3)) == 4, "one of its two blocks went, the last one"
    assert cache.begin(sequence("new again", "new" * 3)) is None, (
        "a found block that nobody has is taken from the free ones: 2 are free and found, a third is needed"
    )


def test_what_is_known_but_free_counts_as_taken_once_it_is_found():
    """Two free blocks, both found: there is no third for the last token."""
    cache, a = paged(3), sequence("a", "12345678")
    cache.release(admitted(cache, a))
    admitted(cache, sequence("b", "abc"))
    assert cache.begin(sequence("c", "123456789")) is None, (
        "a found block that nobody has is taken from the free ones: 2 are free and found, a third is needed"
    )
    assert cache.begin(sequence("d", "1234")) == 0


def test_only_what_is_committed_is_shared():
    """A step may fail, or not have landed: what it was to compute is not there."""
    cache, a = paged(10), sequence("a", "1234567890")
    a.num_computed_tokens = cache.begin(a)
    cache.reserve(a, 10)
    take([(a, 10)])
    assert cache.begin(sequence("b", "1234567890")) == 0
    cache.commit(a, 5)
    assert cache.begin(sequence("c", "1234567890")) == 4


def test_another_adapter_or_salt_finds_nothing():
    cache = paged(20)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.begin(sequence("b", "1234567890", cache_salt="b's own")) == 0
    assert cache.begin(sequence("c", "1234567890", adapter="poetry")) == 0
    assert cache.begin(sequence("d", "1234567890")) == 8


def test_who_wants_every_row_finds_nothing():
    """Its prompt's log probabilities come from rows that a hit would leave out."""
    cache = paged(20)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.begin(sequence("b", "1234567890", every_row=True)) == 0, (
        "who wants every row computes every row"
    )


def test_without_prefix_caching_nothing_is_found():
    cache = paged(10, enable_prefix_caching=False)
    admitted(cache, sequence("a", "1234567890"))
    assert cache.begin(sequence("b", "1234567890")) == 0


def test_what_a_failed_sequence_computed_is_not_found():
    """It may be why it failed: numbers that are none, say."""
    cache, a = paged(10), sequence("a", "1234567890")
    admitted(cache, a)
    a.error = "ArithmeticError"
    cache.release(a)
    assert cache.begin(sequence("b", "1234567890")) == 0, (
        "a failed sequence leaves nothing behind that others find"
    )


# Forks: samples of one request.


def test_a_child_waits_while_its_parents_prompt_is_computed():
    cache, a = paged(10), sequence("a", "1234567890")
    child = sequence("a/1", "1234567890", parent=a)
    admitted(cache, a, compute=False)
    assert cache.begin(child) is None, "the parent has computed nothing yet: not now"
    step(cache, (a, 4))
    assert cache.begin(child) is None, "the parent is in the middle of its prompt: not now"
    assert cache.usage().num_sequences == 1
    step(cache, (a, 6))
    assert cache.begin(child) == 9, "all but the last token are there"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_child_shares_full_blocks_and_has_a_copy_of_the_one_it_will_write(prefix_caching):
    cache = paged(10, enable_prefix_caching=prefix_caching)
    a = admitted(cache, sequence("a", "1234567890"))
    a.token_ids.append(ord("x"))
    child = sequence("a/1", "1234567890", parent=a)
    child.num_computed_tokens = cache.begin(child)
    assert child.num_computed_tokens == 9
    assert table(cache, child)[:2] == table(cache, a)[:2], "the prompt's full blocks are shared"
    assert table(cache, child)[2] != table(cache, a)[2], "the block both would write is not shared but copied"
    assert cache.blocks.references[table(cache, a)[2]] == 1
    copied = cache.keys[0][table(cache, child)].flatten()[:9].tolist()
    assert copied == child.token_ids[:9], "the copy holds what the parent's block holds"
    step(cache, (a, 1), (child, 1))
    child.token_ids.append(ord("y"))
    step(cache, (child, 1))
    assert tokens_in_pages(cache, a) == [*map(ord, "1234567890x")]
    assert tokens_in_pages(cache, child) == [*map(ord, "1234567890y")]


def test_a_child_whose_parent_has_left_begins_like_anyone_else():
    cache = paged(10)
    a = admitted(cache, sequence("a", "1234567890"))
    cache.release(a)
    child = sequence("a/1", "1234567890", parent=a)
    assert cache.begin(child) == 8, "the prefix cache still knows the parent's full blocks"


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
    assert cache.begin(child) == 10


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


# Attention in mixed steps, and what others left behind.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_mixed_steps_equals_each_sequences_single_cache(q_heads, kv_heads, seed, dtype):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = replace(CONFIG, num_layers=2, num_heads=q_heads, num_kv_heads=kv_heads, head_dim=8)
    cache = paged(64, config=config, dtype=dtype)
    cache.memory.fill_(torch.nan)
    seqs = [sequence(name, range(i, 60 + i)) for i, name in enumerate("abcd")]
    singles = [SingleCache(config, 64, dtype=dtype) for _ in seqs]
    for seq in seqs:
        cache.begin(seq)
    while any(seq.num_computed_tokens < 60 for seq in seqs):
        open_ones = [s for s in range(4) if seqs[s].num_computed_tokens < 60]
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        new = [min(rng.choice([1, 1, 2, 7, 20]), 60 - seqs[s].num_computed_tokens) for s in chosen]
        for s, n in zip(chosen, new, strict=True):
            assert cache.reserve(seqs[s], seqs[s].num_computed_tokens + n)
        batch = take([(seqs[s], n) for s, n in zip(chosen, new, strict=True)])
        attend = cache.attention(batch)
        for layer in range(2):
            q = torch.randn(batch.num_tokens, q_heads, 8, generator=generator, dtype=dtype)
            k, v = torch.randn(2, batch.num_tokens, kv_heads, 8, generator=generator, dtype=dtype)
            out = attend(layer, q, k, v)
            for i, s in enumerate(chosen):
                part = slice(*batch.query_start[i : i + 2])
                expected = singles[s].attend(layer, q[part], k[part], v[part])
                assert (out[part] - expected).abs().max() <= 1e-5
        for s, n in zip(chosen, new, strict=True):
            singles[s].advance(n)


# One sequence alone in a step: in one piece.


class Seen:
    """A kernel that notes the keys it is given."""

    def __init__(self) -> None:
        self.keys = []

    def __call__(self, q, k, v, spans):
        self.keys.append(k)
        return dense_attention(q, k, v, spans)


def test_who_is_alone_and_in_blocks_that_follow_one_another_is_read_where_it_lies():
    kernel = Seen()
    cache, a = paged(8, kernel=kernel), sequence("a", range(1, 12))
    other = admitted(cache, sequence("other", [50, 51]))
    a.num_computed_tokens = cache.begin(a)
    for n, mean in [(6, 3.5), (1, 4), (4, 6)]:
        assert step(cache, (a, n))[-1] == mean, "the last row is the mean of all tokens so far"
        assert kernel.keys[-1].data_ptr() == cache.keys[1][1].data_ptr(), (
            "views of the pages: nothing is copied"
        )
        cache.release(other)  # block 0 is at the front of the queue
    assert table(cache, a) == [1, 2, 3], (
        "a sequence's next block is the one right behind its last, if it is free"
    )
    assert tokens_in_pages(cache, a) == a.token_ids


def test_who_is_alone_in_scattered_blocks_is_copied_together_once():
    kernel = Seen()
    cache, a = paged(40, kernel=kernel), sequence("a", range(1, 90))
    a.num_computed_tokens = cache.begin(a)
    step(cache, (a, 3))
    admitted(cache, sequence("other", [50, 51]))  # has block 1
    while a.num_tokens_to_compute:
        n = min(a.num_computed_tokens % 7 + 1, a.num_tokens_to_compute)
        assert abs(step(cache, (a, n))[-1] - (a.num_computed_tokens + 1) / 2) < 1e-4
        assert tokens_in_pages(cache, a) == a.token_ids[: a.num_computed_tokens], "pages hold all tokens, too"
    assert table(cache, a)[:3] == [0, 2, 3]
    where = {keys.data_ptr() for keys in kernel.keys[::2]}  # layer 0
    assert len(where) <= 4, "a copy is made once, and again when it is full, not at every step"


def test_a_copy_is_not_used_once_others_were_in_a_step():
    """What was stored among others is not in it."""
    cache, a, b = paged(20), sequence("a", range(1, 30)), sequence("b", range(100, 130))
    for seq in (a, b):
        seq.num_computed_tokens = cache.begin(seq)
        step(cache, (seq, 3))
    for _ in range(3):
        assert abs(step(cache, (a, 2))[-1] - (a.num_computed_tokens + 1) / 2) < 1e-4
        step(cache, (a, 1), (b, 1))
        assert abs(step(cache, (a, 4))[-1] - (a.num_computed_tokens + 1) / 2) < 1e-4
        assert abs(step(cache, (b, 2))[-1] - 99 - (b.num_computed_tokens + 1) / 2) < 1e-4
    assert not cache.held["a"].table.is_run


def test_what_a_step_takes_back_is_written_over_in_a_copy_too():
    """A step failed, or drafts were rejected: the next one writes other tokens at the same positions."""
    cache, a = paged(20), sequence("a", range(1, 30))
    a.num_computed_tokens = cache.begin(a)
    step(cache, (a, 3))
    admitted(cache, sequence("other", [50, 51]))
    step(cache, (a, 7))
    a.num_computed_tokens, a.token_ids[8:10] = 8, [90, 100]
    assert abs(step(cache, (a, 1)).item() - (36 + 90) / 9) < 1e-4
    assert abs(step(cache, (a, 1)).item() - (36 + 190) / 10) < 1e-4
    assert tokens_in_pages(cache, a) == a.token_ids[:10]
    assert not cache.held["a"].table.is_run


def test_who_comes_back_alone_is_not_read_from_its_old_copy():
    cache, a, b = paged(20, enable_prefix_caching=False), sequence("a", range(1, 30)), sequence("b", [7])
    a.num_computed_tokens = cache.begin(a)
    step(cache, (a, 3))
    admitted(cache, b)
    step(cache, (a, 5))
    cache.preempt(a)
    a.num_computed_tokens, a.token_ids[0] = cache.begin(a), 10
    step(cache, (a, 8))
    assert abs(step(cache, (a, 1)).item() - (45 + 9) / 9) < 1e-4, (
        "what it computed anew, not what it had before"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leave", ["release", "preempt"])
def test_a_nan_left_in_a_page_reaches_neither_its_next_owner_nor_a_neighbour(dtype, leave):
    cache = paged(9, dtype=dtype, enable_prefix_caching=False)
    low, high = admitted(cache, sequence("low", range(5))), admitted(cache, sequence("high", range(7)))
    broken = sequence("broken", range(9))
    cache.begin(broken)
    step(cache, (broken, 9), value=torch.nan)
    getattr(cache, leave)(broken)
    fresh = sequence("fresh", range(9))
    cache.begin(fresh)
    assert torch.isfinite(step(cache, (fresh, 3))).all(), "its new pages held NaN, and it read them"
    for seq in (low, high):
        seq.token_ids.append(1)
    for _ in range(2):
        out = step(cache, (low, 1), (fresh, 2), (high, 1))
        assert torch.isfinite(out).all(), "a NaN in another's page was read"
        for seq in (low, high):
            seq.token_ids.append(1)
    assert torch.isfinite(step(cache, (low, 1), (fresh, 1), (high, 1))).all()


@pytest.mark.parametrize("seed", range(3))
def test_request_in_a_mixed_batch_has_the_logits_of_the_same_request_alone(model, tokenizer, seed):
    """Sequences of unlike lengths, in steps of unlike sizes, joining, leaving and sharing pages."""
    rng = random.Random(seed)
    texts = [
        "It was raining. " * 5,
        "Once upon a time there was a little girl named",
        "🦊",
        "It was raining. " * 4,
        "It was raining. " * 3 + "Tom and",
    ]
    cache = paged(40, config=model.config)
    cache.memory.fill_(torch.nan)
    watch = Invariants(cache)
    forward = ModelForward(model, cache)
    waiting = [sequence(str(i), tokenizer.encode(text)) for i, text in enumerate(texts)]
    alone = {seq.id: CachedForward(model) for seq in waiting}
    running, checked = [], 0
    while waiting or running:
        while waiting and len(running) < 3 and (cached := cache.begin(waiting[0])) is not None:
            waiting[0].num_computed_tokens = cached
            running.append(waiting.pop(0))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        work = [(seq, rng.randint(1, seq.num_tokens_to_compute)) for seq in chosen]
        for seq, n in work:
            assert cache.reserve(seq, seq.num_computed_tokens + n)
        batch = take(work)
        watch.check(batch)
        logits = forward(batch)
        finished = [seq for seq, rows in zip(batch.requests, batch.logit_rows, strict=True) if rows]
        for seq, row in zip(finished, logits, strict=True):
            expected = alone[seq.id](seq.token_ids)
            assert (row - expected).abs().max() <= 1e-4
            seq.token_ids.append(int(expected.argmax()))
            checked += 1
        for seq in chosen:
            cache.commit(seq, seq.num_computed_tokens)
            if len(seq.token_ids) > seq.num_prompt_tokens + 12:
                running.remove(seq)
                cache.release(seq)
    assert checked == 5 * 13
    assert cache.hit_tokens > 0
    assert cache.usage().tokens_held == 0
