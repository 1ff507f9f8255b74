"""`tiled_causal_attention`: who meets whom, in which tile, and what is never computed."""

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from engine.attention import tiled
from engine.attention.dense import causal_attention
from engine.attention.tiled import RunningSoftmax, tiled_causal_attention
from tests.part01.outcome import outcome
from tests.part09.sequences import furthest, random_qkv


def right(Tq: int, Tk: int, tile: int, Hq: int = 2, Hkv: int = 2) -> bool:
    """Whether it gives what Part 1's attention gives."""
    q, k, v, _ = random_qkv([(Tq, Tk)], Hq, Hkv)
    got = outcome(tiled_causal_attention, q, k, v, tile)
    assert isinstance(got, Tensor), f"tiled_causal_attention raised {got}"
    assert got.shape == q.shape, "[Tq, Hq, Dh] comes back: a row for each query"
    hidden_first = Tk > tile and bool(got.isnan().any())
    assert not hidden_first, (
        "NaN: a row met a tile whose keys are all hidden before it had seen any key, and -inf - -inf is no "
        "number. Take the tiles from key 0 on, which every query sees"
    )
    return furthest(got, causal_attention(q, k, v)) <= 1e-5


def test_a_token_alone_gets_its_own_value():
    q, k, v, _ = random_qkv([(1, 1)])
    got = outcome(tiled_causal_attention, q, k, v, 4)
    assert isinstance(got, Tensor), f"tiled_causal_attention raised {got}"
    near = furthest(got, v) <= 1e-5
    assert near, "a token sees itself: alone, all of its weight is on its own value"


def test_a_sequence_that_fits_into_one_tile():
    assert right(4, 4, tile=4), (
        "one tile: scores are q·k / √Dh, and a token sees itself and those before it, none behind it"
    )


def test_a_single_query_sees_all_keys_tile_by_tile():
    assert right(1, 11, tile=4), "a single query is the last token: it sees the keys of all tiles"


def test_queries_of_several_tiles():
    assert right(8, 8, tile=4), "the second tile of queries sees the first tile of keys and its own"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 9, 18])
def test_lengths_around_a_tile(length):
    assert right(length, length, tile=4), f"{length} tokens in tiles of 4: the last tile may be shorter"


@pytest.mark.parametrize(("Tq", "Tk"), [(2, 5), (3, 9), (4, 8), (5, 6), (9, 30)])
def test_fewer_queries_than_keys_are_the_last_tokens(Tq, Tk):
    assert right(Tq, Tk, tile=4), (
        f"{Tq} queries over {Tk} keys: query i stands at position Tk - Tq + i and sees the keys up to there"
    )


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_neighbouring_query_heads_share_a_key_head(Hq, Hkv):
    assert right(6, 9, 4, Hq, Hkv), (
        f"{Hq} query heads, {Hkv} key heads: Hq / Hkv *neighbouring* query heads share a key head"
    )


def tiles_of(Tq: int, Tk: int, tile: int, monkeypatch) -> list[torch.Size]:
    """The shapes [H, R, N] of the scores that `RunningSoftmax` was given, one head."""
    shapes = []

    class Watched(RunningSoftmax):
        def add(self, scores, values):
            shapes.append(scores.shape)
            super().add(scores, values)

    monkeypatch.setattr(tiled, "RunningSoftmax", Watched)
    assert right(Tq, Tk, tile, Hq=1, Hkv=1), "every query sees the keys up to its own position"
    return shapes


def test_no_more_than_a_tile_of_scores_exists_at_a_time(monkeypatch):
    shapes = tiles_of(10, 13, 4, monkeypatch)
    assert shapes, "scores go through RunningSoftmax.add, a tile at a time"
    wide = [tuple(shape) for shape in shapes if max(shape[1:]) > 4]
    assert not wide, (
        f"in tiles of 4 there are never more than 4 queries and 4 keys; there were scores of {wide[:2]}"
    )


@pytest.mark.parametrize(("Tq", "Tk", "needed"), [(16, 16, 1 + 2 + 3 + 4), (4, 16, 4), (8, 12, 2 + 3)])
def test_a_tile_in_the_future_is_not_computed(Tq, Tk, needed, monkeypatch):
    count = len(tiles_of(Tq, Tk, 4, monkeypatch))
    assert count == needed, (
        f"{Tq} queries over {Tk} keys in tiles of 4: {needed} hold a key that is seen, {count} were computed"
    )


def test_no_table_of_all_scores_or_of_who_sees_whom_is_ever_there():
    """One narrow head, so that even a mask of one byte for each pair would outweigh all that is needed."""

    def peak(length: int) -> int:
        q, k, v, _ = random_qkv([(length, length)], Hq=1, Hkv=1)
        return peak_bytes(partial(tiled_causal_attention, q, k, v, 64))

    short, long = peak(512), peak(1024)
    assert long < 3 * short, (
        f"twice the text took {long / short:.1f} times the memory: a table of all scores, or a mask for all "
        "of them, was there. Score one tile of keys at a time, and hide the future of that tile alone"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_kept_in_fp32(dtype):
    """2,000 keys alike: added up in bf16, their weights would stop growing at 256."""
    q, k, v = (torch.ones(n, 1, 8, dtype=dtype) for n in (3, 2000, 2000))
    got = outcome(tiled_causal_attention, q, k, v)
    made = "queries, keys and values are made fp32 tile by tile, before the product"
    assert isinstance(got, Tensor), f"{made}; tiled_causal_attention raised {got}"
    assert got.dtype == dtype, "what comes out has the type of q"
    near = furthest(got, torch.ones(3, 1, 8)) <= 1e-5
    assert near, made


def test_scores_that_float16_cannot_hold_do_not_overflow():
    q, k, v = (torch.full((3, 1, 64), 100.0, dtype=torch.float16) for _ in range(3))  # q·k = 640,000
    finite = bool(tiled_causal_attention(q, k, v).isfinite().all())
    assert finite, "queries, keys and values are made fp32 tile by tile, before the product"


def test_inputs_are_left_as_they_were():
    q, k, v, _ = random_qkv([(6, 9)])
    copies = [x.clone() for x in (q, k, v)]
    tiled_causal_attention(q, k, v, 4)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True)), "q, k and v are only read"
