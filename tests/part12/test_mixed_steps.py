"""Attention over pages: in mixed steps, for one sequence alone, and beside what others left behind."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.attention.dense import dense_attention
from engine.attention.paged import paged_decode
from engine.cache.memory import MAX_ROW_BY_ROW
from engine.cache.single import CachedForward, SingleCache
from engine.execution.runner import EagerWay
from engine.requests.batch import Copy
from tests.part06.fakes import CONFIG
from tests.part12.pages import admitted, paged, sequence, step, table, take, tokens_in_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_mixed_steps_equals_each_sequences_single_cache(q_heads, kv_heads, seed, dtype):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = replace(CONFIG, num_layers=2, num_heads=q_heads, num_kv_heads=kv_heads, head_dim=8)
    cache = paged(64, config=config, dtype=dtype)
    cache.memory.memory.fill_(torch.nan)
    seqs = [sequence(name, range(i, 60 + i)) for i, name in enumerate("abcd")]
    singles = [SingleCache(config, 64, dtype=dtype) for _ in seqs]
    for seq in seqs:
        cache.admit(seq)
    while any(seq.num_computed_tokens < 60 for seq in seqs):
        unread = [s for s in range(4) if seqs[s].num_computed_tokens < 60]
        chosen = rng.sample(unread, rng.randint(1, len(unread)))
        new = [min(rng.choice([1, 1, 2, 7, 20]), 60 - seqs[s].num_computed_tokens) for s in chosen]
        for s, n in zip(chosen, new, strict=True):
            assert cache.reserve(seqs[s], seqs[s].num_computed_tokens + n)
        batch = take(cache, *((seqs[s], n) for s, n in zip(chosen, new, strict=True))).batch
        attend = cache.memory.attention(batch)
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
    a.num_computed_tokens = cache.admit(a)
    for n, mean in [(6, 3.5), (1, 4), (4, 6)]:
        assert step(cache, (a, n))[-1] == mean, "the last row is the mean of all tokens so far"
        assert kernel.keys[-1].data_ptr() == cache.memory.keys[1][1].data_ptr(), (
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
    a.num_computed_tokens = cache.admit(a)
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
        seq.num_computed_tokens = cache.admit(seq)
        step(cache, (seq, 3))
    for _ in range(3):
        assert abs(step(cache, (a, 2))[-1] - (a.num_computed_tokens + 1) / 2) < 1e-4
        step(cache, (a, 1), (b, 1))
        assert abs(step(cache, (a, 4))[-1] - (a.num_computed_tokens + 1) / 2) < 1e-4
        assert abs(step(cache, (b, 2))[-1] - 99 - (b.num_computed_tokens + 1) / 2) < 1e-4
    assert 1 not in table(cache, a), "scattered blocks"


def test_what_a_step_takes_back_is_written_over_in_a_copy_too():
    """A step failed, or drafts were rejected: the next one writes other tokens at the same positions."""
    cache, a = paged(20), sequence("a", range(1, 30))
    a.num_computed_tokens = cache.admit(a)
    step(cache, (a, 3))
    admitted(cache, sequence("other", [50, 51]))
    step(cache, (a, 7))
    a.num_computed_tokens, a.token_ids[8:10] = 8, [90, 100]
    assert abs(step(cache, (a, 1)).item() - (36 + 90) / 9) < 1e-4
    assert abs(step(cache, (a, 1)).item() - (36 + 190) / 10) < 1e-4
    assert tokens_in_pages(cache, a) == a.token_ids[:10]
    assert 1 not in table(cache, a), "scattered blocks"


def test_who_comes_back_alone_is_not_read_from_its_old_copy():
    cache, a, b = paged(20, enable_prefix_caching=False), sequence("a", range(1, 30)), sequence("b", [7])
    a.num_computed_tokens = cache.admit(a)
    step(cache, (a, 3))
    admitted(cache, b)
    step(cache, (a, 5))
    cache.preempt(a)
    a.num_computed_tokens, a.token_ids[0] = cache.admit(a), 10
    step(cache, (a, 8))
    assert abs(step(cache, (a, 1)).item() - (45 + 9) / 9) < 1e-4, (
        "what it computed anew, not what it had before"
    )


def test_an_old_copy_is_not_used_once_others_have_written_where_it_was_made_of():
    """Its name is used again, and its places: a prompt got the keys of another one."""
    cache, a = paged(4), sequence("a", range(1, 9))
    a.num_computed_tokens = cache.admit(a)
    step(cache, (a, 3))
    admitted(cache, sequence("other", [50, 51]))
    step(cache, (a, 5))
    old = table(cache, a)
    cache.release(a)
    admitted(cache, sequence("third", [60, 61]))
    writers = [admitted(cache, sequence(name, range(n, n + 4))) for name, n in (("b", 100), ("c", 200))]
    first, second = sorted(writers, key=lambda seq: table(cache, seq) != old[:1])
    for seq in (second, first):
        cache.release(seq)
    a = sequence("a", [*first.token_ids, 7])
    a.num_computed_tokens = cache.admit(a)
    mean = step(cache, (a, 1)).item()
    assert (table(cache, a), cache.hit_tokens) == (old, 4), "found in a block of its old table"
    assert abs(mean - sum(a.token_ids) / 5) < 1e-4


def alone(name: str, table: list[int], start: int, end: int) -> SimpleNamespace:
    """The part of a step's record that matters: tokens start to end of one sequence in these blocks."""
    return SimpleNamespace(
        ids=(name,), tables=np.array([table]), num_tokens=end - start, context_lens=(end,), copies=()
    )  # fmt: skip


@pytest.mark.parametrize("what", ["another sequence", "a copy of blocks"])
def test_a_copy_is_not_used_where_blocks_hold_something_else(what):
    """Blocks 5 and 3 are copied; in the copy's spare room a token of block 8 comes behind them."""
    kernel = Seen()
    memory, P = paged(10, kernel=kernel).memory, 4
    memory.memory.copy_(torch.arange(10.0).view(-1, 1, 1, 1).expand_as(memory.memory))  # block b holds b

    def read(batch) -> list[float]:
        x = torch.full((batch.num_tokens, 1, 1), 50.0)
        memory.attention(batch)(0, x, x, x)
        return kernel.keys[-1].flatten().tolist()

    assert read(alone("a", [5, 3], 7, 8)) == [5.0] * P + [3.0] * 3 + [50.0]
    memory.memory[:, :, 3, 3] = 3.0
    if what == "another sequence":
        read(alone("a", [5, 3, 8], 8, 9))
        assert read(alone("b", [5, 3, 9], 11, 12))[8:] == [9.0] * 3 + [50.0]
    else:
        memory.apply([Copy(0, "fork", (7,), (5,))])
        assert read(alone("a", [5, 3, 8], 8, 9))[:P] == [7.0] * P


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leave", ["release", "preempt"])
def test_a_nan_left_in_a_page_reaches_neither_its_next_owner_nor_a_neighbour(dtype, leave):
    cache = paged(9, dtype=dtype, enable_prefix_caching=False)
    low, high = admitted(cache, sequence("low", range(5))), admitted(cache, sequence("high", range(7)))
    broken = sequence("broken", range(9))
    cache.admit(broken)
    step(cache, (broken, 9), value=torch.nan)
    getattr(cache, leave)(broken)
    fresh = sequence("fresh", range(9))
    cache.admit(fresh)
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
    cache.memory.memory.fill_(torch.nan)
    way = EagerWay(model, cache.memory)
    waiting = [sequence(str(i), tokenizer.encode(text)) for i, text in enumerate(texts)]
    alone = {seq.id: CachedForward(model) for seq in waiting}
    running, checked = [], 0
    while waiting or running:
        while waiting and len(running) < 3 and (cached := cache.admit(waiting[0])) is not None:
            waiting[0].num_computed_tokens = cached
            running.append(waiting.pop(0))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        work = [(seq, rng.randint(1, seq.num_tokens_to_compute)) for seq in chosen]
        for seq, n in work:
            assert cache.reserve(seq, seq.num_computed_tokens + n)
        taken = take(cache, *work)
        cache.invariants.check(taken)
        cache.memory.apply(taken.batch.copies)
        with torch.inference_mode():
            logits = way(taken.batch).values
        for seq, row in zip(taken.sampled_requests(), logits, strict=True):
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


@pytest.mark.parametrize("n", [1, MAX_ROW_BY_ROW, MAX_ROW_BY_ROW + 1])
@pytest.mark.parametrize("with_prefill", [False, True])
def test_few_new_tokens_are_read_row_by_row_on_a_cpu_and_with_prefill_one_alone(n, with_prefill):
    num_rows = []  # of each call of the plan for single tokens

    def decode(pages, num_heads, keys):
        num_rows.append(len(pages.lens))
        return paged_decode(pages, num_heads, keys)

    def prefill(*_):
        pytest.fail("a prompt that is computed from its start sees new keys only")

    cache = paged(16, decode=decode, prefill=prefill if with_prefill else None)
    a, b = admitted(cache, sequence("a", [1, 2])), sequence("b", range(1, n + 1))
    a.token_ids.append(6)
    b.num_computed_tokens = cache.admit(b)
    num_rows.clear()
    assert step(cache, (a, 1), (b, n))[[0, -1]].tolist() == [3, (n + 1) / 2]
    limit = 1 if with_prefill else 8
    assert num_rows == [1 + n if n <= limit else 1], (
        f"a sequence of up to {limit} new tokens is read row by row, a longer one by the varlen kernel"
    )
