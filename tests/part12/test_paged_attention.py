"""Where a token lies, and that attention over pages equals attention over the same keys in one piece."""

import random

import numpy as np
import pytest
import torch

from engine.attention import page_reader
from engine.attention.dense import causal_attention
from engine.attention.paged import Gathered, Pages, gather, paged_decode, ragged
from engine.attention.slot_decode import Ragged


def test_a_token_lies_in_its_block_at_its_place():
    pages = Pages(np.array([[5, 2, 9, 1]]), np.array([11]), 4)  # nothing lies in the last column
    places = pages.places(np.array([0, 0, 0]), np.array([0, 6, 10])).tolist()
    assert places[0] == 20, "token 0 lies in the table's first block, 5, at place 0: 5 · 4 + 0"
    assert places[1] == 10, "token 6 lies in the table's second block, 2, at place 2: 2 · 4 + 2"
    assert places[2] == 38, "token 10 lies in the table's third block, 9, at place 2: 9 · 4 + 2"


def test_each_sequence_has_its_own_table():
    pages = Pages.of([np.array([5, 2]), np.array([7])], [8, 3], block_size=4)
    assert pages.places(np.array([0, 1, 1]), np.array([5, 0, 2])).tolist() == [9, 28, 30], (
        "token 5 of sequence 0 is in block 2; tokens 0 and 2 of sequence 1 are in block 7"
    )


def test_all_places_are_those_of_each_token_in_order():
    pages = Pages.of([np.array([1, 0]), np.array([3]), np.array([2, 5, 9])], [3, 2, 4], block_size=2)
    assert pages.all_places().tolist() == [2, 3, 0, 6, 7, 4, 5, 10, 11]


def test_blocks_beyond_a_sequences_length_are_left_out():
    """Room that was reserved, for drafts say, and holds nothing yet."""
    pages = Pages.of([np.array([4, 6, 8])], [3], block_size=2)
    assert pages.tables.tolist() == [[4, 6]]
    assert pages.select(np.array([True])).all_places().tolist() == [8, 9, 12]


def scene(heads, kv_heads, dtype, seed, left_behind, block_size=4):
    """S sequences in shuffled blocks: (pages, q, keys, values, each sequence's own keys and values)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    S, B, Dh = rng.randint(1, 6), 40, 16
    lens = [rng.randint(1, 20) for _ in range(S)]
    order = rng.sample(range(B), B)
    tables = [np.array([order.pop() for _ in range(-(-n // block_size))]) for n in lens]
    q = torch.randn(S, heads, Dh, generator=generator, dtype=dtype)
    keys, values = torch.full((2, B, block_size, kv_heads, Dh), left_behind, dtype=dtype)
    own = []
    for table, n in zip(tables, lens, strict=True):
        k, v = torch.randn(2, n, kv_heads, Dh, generator=generator, dtype=dtype)
        for i in range(n):
            keys[table[i // block_size], i % block_size] = k[i]
            values[table[i // block_size], i % block_size] = v[i]
        own.append((k, v))
    return Pages.of(tables, lens, block_size), q, keys, values, own


@pytest.mark.parametrize("how", [Gathered, ragged, paged_decode])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_reading_pages_equals_attention_over_keys_in_one_piece(how, heads, kv_heads, seed):
    """And what others left in the memory, NaN, reaches nobody."""
    pages, q, keys, values, own = scene(heads, kv_heads, torch.float32, seed, torch.nan)
    out = how(pages, heads, keys)(q, keys, values)
    for s, (k, v) in enumerate(own):
        assert (out[s] - causal_attention(q[s : s + 1], k, v)[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("in_c", [True, False])
def test_a_cpu_reads_pages_where_they_lie_and_gathers_them_in_16_bits(in_c, monkeypatch):
    if in_c and not page_reader.is_available():
        pytest.skip("our C wants a compiler")
    monkeypatch.setattr(page_reader, "is_available", lambda: in_c)
    reads = page_reader.PageReader if in_c else Ragged
    for dtype, kind in {torch.float32: reads, torch.bfloat16: Gathered}.items():
        pages, q, keys, values, own = scene(4, 2, dtype, 1, torch.nan)
        plan = paged_decode(pages, 4, keys)
        assert type(plan) is kind
        out = plan(q, keys, values)
        for s, (k, v) in enumerate(own):
            expected = causal_attention(q[s : s + 1].float(), k.float(), v.float())[0]
            assert (out[s] - expected).abs().max() <= (1e-5 if dtype is torch.float32 else 0.05)


def test_one_plan_serves_every_layer():
    pages, q, keys, values, _ = scene(4, 2, torch.float32, 2, 0.0)
    for how in (Gathered, ragged, paged_decode):
        plan = how(pages, 4, keys)
        first = plan(q, keys, values)
        assert not torch.equal(plan(q, values, keys), first)
        assert torch.equal(plan(q, keys, values), first)


def test_gathered_tokens_are_those_that_were_asked_for():
    memory = torch.arange(12.0).view(3, 4, 1, 1)
    assert gather(memory, torch.tensor([4, 0, 11])).flatten().tolist() == [4, 0, 11]
