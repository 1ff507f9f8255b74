"""Prefill over pages, against the dense kernel on keys and values gathered from them."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans
from engine.attention.paged import Pages, gather
from engine.kernels.paged_prefill import PagedPrefill
from engine.machine.device import on_device
from tests.part13.test_paged_attention import DEVICE, P, scattered


def assert_same(lengths, Hq=2, Hkv=2, Dh=16, dtype=torch.float32, tolerance=1e-5, longer=0):
    """lengths: (new tokens, all tokens) of each sequence; `longer`: columns of the block table too many."""
    new, lens = zip(*lengths, strict=True)
    pages, keys, values, generator = scattered(lens, Hkv, Dh, dtype)
    query_start = (0, *np.cumsum(new).tolist())
    T = query_start[-1]
    q = torch.randn(T, 3, Hq, Dh, generator=generator).to(DEVICE, dtype)[:, 1]  # as of a fused layer
    (places,) = on_device(keys.device, pages.all_places())
    spans = Spans(query_start, (0, *np.cumsum(lens).tolist()))
    want = dense_attention(q, gather(keys, places), gather(values, places), spans)
    if longer:  # there is no such block
        pages = Pages(np.pad(pages.tables, ((0, 0), (0, longer)), constant_values=10**6), pages.lens, P)
    got = PagedPrefill(pages, query_start, keys)(q, keys, values)
    worst = (got.float() - want.float()).abs().amax((1, 2)).tolist()
    wrong = [t for t, error in enumerate(worst) if not error <= tolerance]
    assert not wrong, f"of sequences of {lengths} (new, all) tokens, rows {wrong[:10]} differ from gathering"


@pytest.mark.parametrize("length", [(1, 1), (P, P), (P + 1, P + 1), (70, 70)])
def test_a_prompt_from_its_start(length):
    assert_same([length])


@pytest.mark.parametrize("length", [(1, 40), (5, 21), (2, P + 2), (33, 97), (40, 41)])
def test_a_chunk_sees_what_came_before_it_and_nothing_after(length):
    assert_same([length])


def test_several_sequences_read_their_own_pages_alone():
    assert_same([(3, 3), (40, 100), (1, 70), (33, 34)])


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (6, 2), (3, 3)])
def test_query_heads_that_share_a_key_head(Hq, Hkv):
    assert_same([(5, 20), (35, 35)], Hq=Hq, Hkv=Hkv)


@pytest.mark.parametrize("Dh", [16, 24, 80])
def test_heads_of_any_width(Dh):
    assert_same([(5, 20), (35, 35)], Dh=Dh)


def test_a_block_table_longer_than_needed():
    assert_same([(5, 20), (35, 60)], longer=3)


def test_half_precision():
    assert_same([(5, 20), (70, 90)], Hq=4, dtype=torch.float16, tolerance=5e-3)


def test_the_plan_takes_any_layers_keys():
    pages, keys, values, generator = scattered([40, 7], Hkv=2, Dh=16)
    query_start = (0, 8, 10)
    plan = PagedPrefill(pages, query_start, keys)
    spans = Spans(query_start, (0, 40, 47))
    (places,) = on_device(keys.device, pages.all_places())
    for _ in range(2):
        q = torch.randn(10, 2, 16, generator=generator).to(DEVICE)
        want = dense_attention(q, gather(keys, places), gather(values, places), spans)
        assert torch.allclose(plan(q, keys, values), want, atol=1e-5)
        keys, values = values, keys


def test_too_wide_heads_are_refused():
    pages, keys, _, _ = scattered([4], Dh=144)
    with pytest.raises(ValueError, match="head_dim=144: this kernel accepts up to 128"):
        PagedPrefill(pages, (0, 4), keys)
