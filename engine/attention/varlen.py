"""What several varlen kernels share: sequence after sequence, and how long the longest is. Part 9."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.interface import Spans, VarlenKernel


def each_alone(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> VarlenKernel:
    """The varlen kernel that calls `attention(q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh])` for each
    sequence.
    """

    def kernel(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        if len(spans.query_start) == 2:  # one sequence: nothing to cut
            return attention(q, k, v)
        pairs = zip(pairwise(spans.query_start), pairwise(spans.key_start), strict=True)
        return torch.cat([attention(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in pairs])  # [T, Hq, Dh]

    return kernel


@lru_cache(maxsize=64)
def longest(starts: tuple[int, ...]) -> int:
    """The most tokens of a sequence: starts[S+1] as in `Spans`. Cached, since every layer of a step asks."""
    return max(end - start for start, end in pairwise(starts))
