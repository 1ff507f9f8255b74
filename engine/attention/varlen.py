"""Helpers of varlen kernels: one call for each sequence, and the length of the longest sequence. Part 9."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.interface import Spans, VarlenKernel


def per_sequence(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> VarlenKernel:
    """The `VarlenKernel` (interface.py) that calls `attention` for one sequence after the other.

    `attention` takes q[Tq, Hq, Dh], k[Tk, Hkv, Dh] and v[Tk, Hkv, Dh] and returns [Tq, Hq, Dh].
    """

    def kernel(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        if len(spans.query_start) == 2:  # a single sequence needs no slicing
            return attention(q, k, v)
        outputs = [attention(q[queries], k[keys], v[keys]) for queries, keys in spans.slices()]
        return torch.cat(outputs)  # [T, Hq, Dh]

    return kernel


@lru_cache(maxsize=64)
def max_length(starts: tuple[int, ...]) -> int:
    """The number of tokens of the longest sequence. `starts` [S+1] is one of the fields of `Spans`.

    The result is cached, because every layer of a step asks for it.
    """
    return max(end - start for start, end in pairwise(starts))
