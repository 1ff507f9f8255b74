"""Attention exactly as its formula: softmax(q·kᵀ / √Dh)·v, with all scores in memory at once.

Promises the exact result for sequences of any length and for grouped heads. Its memory grows with queries ×
keys. Part 9 adds faster kernels with the same interface. Part 1.
Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.
"""

import torch
from torch import Tensor

from engine.attention.interface import Spans


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens. No token sees a later token.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]. Hq is a multiple of Hkv: each key head
    serves Hq / Hkv neighbouring query heads. For example, query i of 2 queries over 3 keys sees keys 0 to
    i + 1. With Hq = 4 and Hkv = 2, query heads 0 and 1 use key head 0. The scale 1/√Dh is applied before the
    product or within it, because an unscaled score can overflow in 16 bits.
    """
    (Tq, Hq, Dh), (Tk, Hkv, _) = q.shape, k.shape
    # 1. Move the head axis to the front, and join the G = Hq / Hkv query heads that share a key head.
    q = q.transpose(0, 1).reshape(Hkv, -1, Dh)  # [Hkv, G·Tq, Dh]
    # 2. Score each query against each key in one scaled product. Its first argument is ignored (beta=0).
    scores = torch.baddbmm(q.new_empty(()), q, k.permute(1, 2, 0), beta=0, alpha=Dh**-0.5)  # [Hkv, G·Tq, Tk]
    # 3. Hide the future. Query i has position Tk - Tq + i. A single query sees all keys.
    if Tq > 1:
        future = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).triu_(Tk - Tq + 1)  # [Tq, Tk]
        scores = scores.view(Hkv, -1, Tq, Tk).masked_fill_(future, -torch.inf).view(Hkv, -1, Tk)
    # 4. Turn the scores into weights (softmax sums in fp32 or better), and average the values.
    weights = torch.softmax(scores, dim=-1)  # [Hkv, G·Tq, Tk]
    out = torch.bmm(weights, v.transpose(0, 1))  # [Hkv, G·Tq, Dh]
    return out.view(Hq, Tq, Dh).transpose(0, 1)  # [Tq, Hq, Dh]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The `VarlenKernel` (interface.py) that calls `causal_attention` for one sequence after the other.

    q[T, Hq, Dh], k[K, Hkv, Dh], v[K, Hkv, Dh] -> [T, Hq, Dh]. Each sequence attends only to itself.
    """
    if len(spans.query_start) == 2:  # a single sequence needs no slicing
        return causal_attention(q, k, v)
    outputs = [causal_attention(q[queries], k[keys], v[keys]) for queries, keys in spans.slices()]
    return torch.cat(outputs)  # [T, Hq, Dh]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The `Attend` (interface.py) that stores no keys and values: the T tokens are one whole sequence.

    q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh] -> [T, Hq, Dh].
    """
    return causal_attention(q, k, v)
