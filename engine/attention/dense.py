"""Attention as the formula says it: softmax(q·kᵀ / √Dh)·v, every score held in memory at once.

Promises the exact result for any lengths and grouped heads; memory grows with queries × keys. Faster kernels
with the same interface come in Part 9. Part 1. Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.
"""

from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.interface import Spans


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens; none sees a later one.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]. Hq is a multiple of Hkv: each key head
    serves Hq / Hkv neighbouring query heads. Query i of 2 over 3 keys sees keys 0 to i + 1; with Hq = 4 and
    Hkv = 2, query heads 0 and 1 use key head 0. Queries are scaled no later than the product: in 16 bits an
    unscaled score can be infinite.
    """
    (Tq, Hq, Dh), (Tk, Hkv, _) = q.shape, k.shape
    # 1. Heads first; the Hq / Hkv query heads that share a key head stand together.
    q = q.transpose(0, 1).reshape(Hkv, -1, Dh)  # [Hkv, G·Tq, Dh]
    # 2. How well does each query match each key? One product, scaled by alpha (beta=0: nothing is added).
    scores = torch.baddbmm(q.new_empty(()), q, k.permute(1, 2, 0), beta=0, alpha=Dh**-0.5)  # [Hkv, G·Tq, Tk]
    # 3. Hide the future. Query i stands at position Tk - Tq + i; a single query is last and sees all.
    if Tq > 1:
        future = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).triu_(Tk - Tq + 1)  # [Tq, Tk]
        scores = scores.view(Hkv, -1, Tq, Tk).masked_fill_(future, -torch.inf).view(Hkv, -1, Tk)
    # 4. Scores to weights (PyTorch sums them in fp32 at least), weights to a mean of the values.
    weights = torch.softmax(scores, dim=-1)  # [Hkv, G·Tq, Tk]
    out = torch.bmm(weights, v.transpose(0, 1))  # [Hkv, G·Tq, Dh]
    return out.view(Hq, Tq, Dh).transpose(0, 1)  # [Tq, Hq, Dh]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The varlen kernel of `interface.py`: each sequence attends to itself alone, one after the other."""
    if len(spans.query_start) == 2:  # one sequence: nothing to cut
        return causal_attention(q, k, v)
    pairs = zip(pairwise(spans.query_start), pairwise(spans.key_start), strict=True)
    return torch.cat([causal_attention(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in pairs])  # [T, Hq, Dh]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend` without a memory: the T tokens are one whole sequence, computed from its start."""
    return causal_attention(q, k, v)
