"""The decode kernel against gathering in plain PyTorch: on a GPU if there is one, else interpreted."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered, Pages
from engine.kernels.paged_attention import PagedAttention, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
P = 16


def scattered(lens, Hkv=2, Dh=32, dtype=torch.float32, seed=0):
    """Pages of sequences of these lengths, their blocks anywhere; whatever belongs to nobody is NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // P) for n in lens]
    B = sum(counts) + 3
    order = torch.randperm(B, generator=generator).numpy()
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    memory = torch.full((2, B, P, Hkv, Dh), torch.nan)
    for table, n in zip(tables, lens, strict=True):
        rows = torch.randn(2, n, Hkv, Dh, generator=generator)
        for i in range(n):
            memory[:, table[i // P], i % P] = rows[:, i]
    keys, values = memory.to(DEVICE, dtype)
    return Pages.of(tables, lens, P), keys, values, generator


def assert_same(lens, Hq, Hkv, Dh, splits, dtype=torch.float32, tolerance=1e-5):
    pages, keys, values, generator = scattered(lens, Hkv, Dh, dtype)
    q = torch.randn(len(lens), Hq, Dh, generator=generator).to(DEVICE, dtype)
    want = Gathered(pages, Hq, keys)(q, keys, values)
    got = paged_attention(q, keys, values, *pages.on(keys.device), splits)
    worst = (got.float() - want.float()).abs().amax((1, 2))
    wrong = [s for s, error in enumerate(worst.tolist()) if not error <= tolerance]
    assert not wrong, f"of sequences of {lens} tokens, {wrong} differ from gathering (splits={splits})"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
def test_a_sequence_of_one_token_a_block_or_one_more_or_less(length):
    assert_same([length], Hq=2, Hkv=2, Dh=32, splits=1)


def test_sequences_of_unlike_lengths_read_their_own_pages_alone():
    assert_same([3, 100, 1, 64, 33], Hq=2, Hkv=2, Dh=32, splits=1)


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (6, 2), (3, 3), (20, 1)])
def test_query_heads_that_share_a_key_head(Hq, Hkv):
    assert_same([5, 70], Hq=Hq, Hkv=Hkv, Dh=32, splits=1)


@pytest.mark.parametrize("Dh", [16, 48, 64, 80, 96, 128])
def test_heads_of_any_width(Dh):
    assert_same([5, 70], Hq=2, Hkv=1, Dh=Dh, splits=2)


@pytest.mark.parametrize("splits", [2, 4, 8, 64])
@pytest.mark.parametrize("lens", [[1], [64], [65], [200], [300, 5, 129]])
def test_parts_of_a_sequence_are_joined_as_if_it_had_not_been_split(lens, splits):
    assert_same(lens, Hq=2, Hkv=1, Dh=32, splits=splits)


def test_large_scores_do_not_overflow():
    pages, keys, values, generator = scattered([150, 90])
    q = torch.randn(2, 2, 32, generator=generator).to(DEVICE) * 300
    for splits in (1, 4):
        got = paged_attention(q, keys, values, *pages.on(keys.device), splits)
        same = torch.allclose(got, Gathered(pages, 2, keys)(q, keys, values), atol=1e-4)
        assert same, "the maximum never falls, so that no e^x overflows, however large the scores"


def test_half_precision():
    assert_same([70, 5], Hq=4, Hkv=2, Dh=64, splits=2, dtype=torch.float16, tolerance=5e-3)


def test_the_plan_takes_any_layers_keys():
    pages, keys, values, generator = scattered([40, 7])
    plan, oracle = PagedAttention(pages, 2, keys), Gathered(pages, 2, keys)
    for _ in range(2):
        q = torch.randn(2, 2, 32, generator=generator).to(DEVICE)
        assert torch.allclose(plan(q, keys, values), oracle(q, keys, values), atol=1e-5)
        keys, values = values, keys


def test_too_wide_heads_are_refused():
    pages, keys, _, _ = scattered([4], Dh=272)
    with pytest.raises(ValueError, match="head_dim=272: this kernel accepts up to 256"):
        PagedAttention(pages, 2, keys)
