"""Packed sequences of random numbers, and what attention makes of them, computed in the plainest way."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans

try:
    import triton  # noqa: F401

    TRITON = ["triton", "triton_tma"]  # the plain kernel, or what suits the GPU; the one for Hopper
except ImportError:
    TRITON = []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spans_of(lengths: list[tuple[int, int]]) -> Spans:
    """One sequence for each (number of queries, number of keys)."""
    queries, keys = zip(*lengths, strict=True)
    return Spans((0, *accumulate(queries)), (0, *accumulate(keys)))


def random_qkv(
    lengths: list[tuple[int, int]],
    Hq: int = 2,
    Hkv: int = 2,
    Dh: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Spans]:
    """q[T, Hq, Dh], k and v[K, Hkv, Dh], and the spans."""
    spans, generator = spans_of(lengths), torch.Generator().manual_seed(seed)
    T, K = spans.query_start[-1], spans.key_start[-1]
    tensors = [torch.randn(n, H, Dh, generator=generator) for n, H in ((T, Hq), (K, Hkv), (K, Hkv))]
    return *(x.to(device, dtype) for x in tensors), spans


def reference(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Eager attention in fp32, on the CPU."""
    return dense_attention(*(x.float().cpu() for x in (q, k, v)), spans)


def furthest(got: Tensor, want: Tensor) -> float:
    """The largest difference; infinite where one is no number."""
    return float((got.float().cpu() - want).abs().nan_to_num(torch.inf).max())


def wrong_sequences(got: Tensor, want: Tensor, spans: Spans, tolerance: float) -> list[int]:
    """Which sequences are further from `want` than allowed, counting from 0."""
    return [
        s for s, (a, b) in enumerate(pairwise(spans.query_start)) if furthest(got[a:b], want[a:b]) > tolerance
    ]
