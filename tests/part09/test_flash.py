"""`sdpa_causal_attention`: PyTorch's kernel, told the truth about who sees whom."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.attention import flash
from engine.attention.dense import causal_attention
from engine.attention.flash import MASK_QUERIES, sdpa_causal_attention, supports_varlen
from tests.part01.outcome import outcome
from tests.part09.sequences import furthest, random_qkv


def right(Tq: int, Tk: int, Hq: int = 2, Hkv: int = 2) -> bool:
    q, k, v, _ = random_qkv([(Tq, Tk)], Hq, Hkv)
    got = outcome(sdpa_causal_attention, q, k, v)
    hint = "" if Hq == Hkv else "fewer key heads than query heads: enable_gqa says so to PyTorch; "
    assert isinstance(got, Tensor), f"{hint}sdpa_causal_attention raised {got}"
    assert got.shape == q.shape, (
        "[Tq, Hq, Dh] comes back; PyTorch's kernel wants heads before tokens, and a batch"
    )
    return furthest(got, causal_attention(q, k, v)) <= 1e-5


def test_a_whole_sequence():
    assert right(7, 7), "a whole sequence: a token sees itself and those before it, none behind it"


def test_a_single_query_sees_every_key():
    assert right(1, 9), (
        "a single query is the last token and sees every key; is_causal would let it see only key 0"
    )


@pytest.mark.parametrize(("Tq", "Tk"), [(2, 5), (3, 9), (8, 9)])
def test_fewer_queries_than_keys_are_the_last_tokens(Tq, Tk):
    assert right(Tq, Tk), (
        f"{Tq} queries over {Tk} keys: query i sees the keys up to Tk - Tq + i; is_causal would stop at key i"
    )


@pytest.mark.parametrize(("Tq", "Tk"), [(6, 6), (1, 9), (3, 9)])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 2), (6, 2), (4, 1)])
def test_neighbouring_query_heads_share_a_key_head(Hq, Hkv, Tq, Tk):
    assert right(Tq, Tk, Hq, Hkv), (
        f"{Hq} query heads, {Hkv} key heads: neighbouring query heads share a key head"
    )


def masks_of(Tq: int, Tk: int, monkeypatch) -> list[torch.Size]:
    """The shapes of the masks that PyTorch's kernel was given."""
    shapes, real = [], torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **settings):
        if attn_mask is not None:
            shapes.append(attn_mask.shape[-2:])
        return real(q, k, v, attn_mask=attn_mask, **settings)

    monkeypatch.setattr(flash.F, "scaled_dot_product_attention", watched)
    assert right(Tq, Tk), f"{Tq} queries over {Tk} keys: every query sees the keys up to its own position"
    return shapes


@pytest.mark.parametrize("length", [1, 5, MASK_QUERIES + 1])
def test_a_whole_sequence_and_a_single_query_need_no_mask(length, monkeypatch):
    assert masks_of(length, length, monkeypatch) == [], (
        "a whole sequence needs no mask: is_causal says it all"
    )
    assert masks_of(1, length, monkeypatch) == [], "a single query needs no mask: it sees every key"


def test_a_mask_has_at_most_mask_queries_rows(monkeypatch):
    shapes = masks_of(2 * MASK_QUERIES + 3, 2 * MASK_QUERIES + 50, monkeypatch)
    most = max(shape[0] for shape in shapes)
    assert most <= MASK_QUERIES, (
        f"MASK_QUERIES = {MASK_QUERIES} queries share a mask; one had {most}: memory would grow with Tq · Tk"
    )


def test_a_mask_covers_the_keys_that_its_last_query_sees(monkeypatch):
    shapes = masks_of(2 * MASK_QUERIES, 2 * MASK_QUERIES + 50, monkeypatch)
    keys = [shape[1] for shape in shapes]
    assert keys == [MASK_QUERIES + 50, 2 * MASK_QUERIES + 50], (
        "a mask covers the keys that the last of its queries sees, and no later ones, which nobody sees: "
        f"{MASK_QUERIES + 50} and {2 * MASK_QUERIES + 50} keys here, not {keys}"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_is_close(dtype):
    q, k, v, _ = random_qkv([(6, 9)], dtype=dtype)
    out = sdpa_causal_attention(q, k, v)
    assert out.dtype == dtype, "what comes out has the type of q"
    assert furthest(out, causal_attention(q.float(), k.float(), v.float())) <= 0.02


def test_a_cpu_takes_no_packed_call():
    q, k, _, _ = random_qkv([(6, 6)], dtype=torch.bfloat16)
    assert not supports_varlen(q, k)


@pytest.mark.parametrize(
    ("num_bytes", "key_heads", "head_dim", "capability", "taken"),
    [
        (2, 4, 64, (8, 0), True), (2, 4, 8, (9, 0), True), (4, 4, 64, (9, 0), False),
        (2, 2, 64, (9, 0), False), (2, 4, 60, (9, 0), False), (2, 4, 64, (7, 5), False),
    ],
    ids=["Ampere", "narrow", "fp32", "fewer key heads", "no multiple of 8", "before Ampere"],
)  # fmt: skip
def test_what_the_packed_call_takes_on_a_gpu(monkeypatch, num_bytes, key_heads, head_dim, capability, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, k = (
        SimpleNamespace(
            is_cuda=True, device="cuda", shape=(6, heads, head_dim), element_size=lambda: num_bytes
        )
        for heads in (4, key_heads)
    )
    assert supports_varlen(q, k) == taken
