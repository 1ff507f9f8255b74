"""Dense attention against the formula, one query at a time."""

from itertools import accumulate

import pytest
import torch

from engine.attention.dense import causal, causal_attention, dense_attention
from engine.attention.interface import Spans
from tests.part01.outcome import outcome


def random_qkv(queries: int, keys: int, Hq: int = 4, Hkv: int = 4, Dh: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, Dh, generator=generator) for shape in ((queries, Hq), (keys, Hkv), (keys, Hkv))
    ]


def one_by_one(q, k, v):
    """softmax(q·k / √Dh)·v for each query and head alone, over the keys up to its own position."""
    out = torch.empty_like(q)
    share = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            keys, values = k[:seen, head // share], v[:seen, head // share]  # [seen, Dh]
            weights = torch.softmax(keys @ q[i, head] / q.shape[-1] ** 0.5, dim=0)
            out[i, head] = weights @ values
    return out


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 5), (3, 9), (9, 9)])
def test_every_query_sees_its_own_past_and_nothing_else(queries, keys, Hq, Hkv):
    q, k, v = random_qkv(queries, keys, Hq, Hkv)
    torch.testing.assert_close(causal_attention(q, k, v), one_by_one(q, k, v), atol=1e-5, rtol=0)


def test_a_later_key_or_value_changes_no_earlier_output():
    q, k, v = random_qkv(6, 6)
    before = causal_attention(q, k, v)
    k[4:], v[4:] = 100.0, -100.0
    after = causal_attention(q, k, v)
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


@pytest.mark.parametrize("share", [2, 4])
def test_grouped_heads_equal_repeated_key_heads(share):
    q, k, v = random_qkv(5, 7, Hq=8, Hkv=8 // share)
    repeated = [x.repeat_interleave(share, dim=1) for x in (k, v)]
    torch.testing.assert_close(causal_attention(q, k, v), causal_attention(q, *repeated), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "lengths", [[(3, 3)], [(2, 5), (1, 7), (4, 4)], [(1, 1), (1, 1)], [(1, 9), (6, 6), (1, 2)]]
)
def test_several_sequences_end_to_end_equal_each_alone(lengths):
    parts = [random_qkv(tq, tk, Hq=4, Hkv=2, seed=i) for i, (tq, tk) in enumerate(lengths)]
    spans = Spans(
        tuple(accumulate((tq for tq, _ in lengths), initial=0)),
        tuple(accumulate((tk for _, tk in lengths), initial=0)),
    )
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    out = dense_attention(q, k, v, spans)
    assert torch.equal(out, torch.cat([causal_attention(*part) for part in parts]))


def test_query_and_key_sequences_must_be_as_many():
    with pytest.raises(ValueError, match="2 sequences of queries, 1 of keys"):
        Spans((0, 2, 4), (0, 4))


def test_spans_reach_a_device_once_however_many_layers_ask():
    spans = Spans((0, 2, 4), (0, 5, 9))
    query_start, key_start = spans.on(torch.device("cpu"))
    assert (query_start.tolist(), key_start.tolist()) == ([0, 2, 4], [0, 5, 9])
    assert {query_start.dtype, key_start.dtype} == {torch.int32}, "kernels count in int32"
    again = spans.on(torch.device("cpu"))
    assert again[0] is query_start, "the same tensors for every layer"
    assert again[1] is key_start, "the same tensors for every layer"


def test_without_a_memory_the_layer_does_not_matter():
    q, k, v = random_qkv(4, 4)
    assert torch.equal(causal(0, q, k, v), causal(7, q, k, v))
    assert torch.equal(causal(0, q, k, v), causal_attention(q, k, v))


def test_inputs_are_left_as_they_were():
    tensors = random_qkv(4, 6)
    copies = [tensor.clone() for tensor in tensors]
    causal_attention(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_is_close(dtype):
    q, k, v = random_qkv(6, 6)
    out = outcome(causal_attention, q.to(dtype), k.to(dtype), v.to(dtype))
    assert isinstance(out, torch.Tensor), f"16 bits have no number as large as 1e9: hide with -inf. {out}"
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), causal_attention(q, k, v), atol=0.05, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_many_keys_are_summed_in_more_than_half_precision(dtype):
    """2,000 keys alike: added up in bf16, their weights would stop growing at 256."""
    q, k, v = (torch.ones(n, 1, 8, dtype=dtype) for n in (1, 2000, 2000))
    torch.testing.assert_close(causal_attention(q, k, v).float(), torch.ones(1, 1, 8), atol=0.01, rtol=0)


def test_half_precision_scores_are_scaled_before_they_could_overflow():
    q, k, v = (torch.full((3, 1, 64), 40.0, dtype=torch.float16) for _ in range(3))  # q·k = 102,400
    finite = bool(causal_attention(q, k, v).isfinite().all())
    assert finite, "divide q by √Dh before the product: in float16 the unscaled score, 102,400, is infinite"


def test_scores_too_large_for_an_exponential_do_not_overflow():
    q, k, v = random_qkv(4, 4)
    assert causal_attention(q * 1e4, k, v).isfinite().all()
