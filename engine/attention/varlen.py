"""What several varlen kernels share: a call for each sequence, and the length of the longest. Part 9."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.interface import Spans, VarlenKernel


def per_sequence(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> VarlenKernel:
    """The varlen kernel that calls `attention(q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh])` for one
    sequence after the other.
    """

    def kernel(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        if len(spans.query_start) == 2:  # one sequence: nothing to cut
            return attention(q, k, v)
        pairs = zip(pairwise(spans.query_start), pairwise(spans.key_start), strict=True)
        return torch.cat([attention(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in pairs])  # [T, Hq, Dh]

    return kernel


@lru_cache(maxsize=64)
def max_length(starts: tuple[int, ...]) -> int:
    """Tokens of the longest sequence: starts[S+1] as in `Spans`. Cached, since every layer of a step asks."""
    return max(end - start for start, end in pairwise(starts))
