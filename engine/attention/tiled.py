"""Attention without a matrix of all scores: a running softmax over tiles of keys. Part 9.

Promises the results of `causal_attention` (dense.py) up to rounding, in memory that grows with the length and
not with its square. TILE queries are scored against TILE keys at a time, and the scores are dropped before
the next tile. Sums are in fp32, whatever the dtype of q, k and v. This is plain PyTorch that you can step
through; `flash.py` and `engine/kernels/` compute the same faster. Sources: Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867 (the running softmax); Dao et al. 2022, https://arxiv.org/abs/2205.14135
(attention in tiles).
"""

import torch
from torch import Tensor

from engine.attention.varlen import per_sequence

TILE = 128  # queries in a tile of queries, and keys in a tile of keys


class RunningSoftmax:
    """Computes softmax(scores)·values for R rows in each of H heads, one tile of scores and values at a time.

    Three tensors hold the state of each row between two tiles: `maximum` is the row's largest score so far,
    `total` is the sum of exp(score - maximum) over the row's scores so far, and `weighted` is the sum of
    exp(score - maximum) · value over the same scores.
    """

    def __init__(self, H: int, R: int, Dh: int, device: torch.device | str = "cpu") -> None:
        """Begin with no score in any row. A value has Dh numbers."""
        self.maximum = torch.full((H, R, 1), -torch.inf, device=device)  # [H, R, 1]
        self.total = torch.zeros(H, R, 1, device=device)  # [H, R, 1]
        self.weighted = torch.zeros(H, R, Dh, device=device)  # [H, R, Dh]

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add one tile: scores[H, R, N] of N keys, and the keys' values[H, N, Dh].

        A score of -inf stands for a key that the row may not see, and has weight 0. In its first tile, each
        row sees at least one key. No exponential overflows, however large the scores are, because every
        exponent is at most 0.
        """
        # 1. The largest score so far. The sums so far are relative to the old maximum, which is not larger.
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))  # [H, R, 1]
        # 2. Make the sums relative to the new maximum: exp(s - old) · exp(old - new) = exp(s - new).
        shrink = torch.exp(self.maximum - maximum)  # [H, R, 1]
        # 3. Add the terms of this tile, which are relative to the new maximum, too.
        weights = torch.exp(scores - maximum)  # [H, R, N]
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.weighted = self.weighted * shrink + weights @ values
        self.maximum = maximum

    def mean(self) -> Tensor:
        """[H, R, Dh]: softmax(scores)·values over all tiles so far."""
        return self.weighted / self.total


def tiled_causal_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = TILE) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens. No token sees a later token.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh], in q's dtype. Query i has position
    Tk - Tq + i. Each tile of `tile` queries has a `RunningSoftmax`, which takes in the keys `tile` at a time,
    from key 0 to the key of the tile's last query. A tile of keys that lies wholly in the queries' future is
    not computed. Tiles of q, k and v become fp32 before they are multiplied. No tensor of Tq · Tk elements is
    made, neither scores nor a mask.
    """
    (Tq, Hq, Dh), (Tk, Hkv, _) = q.shape, k.shape
    G, past = Hq // Hkv, Tk - Tq
    out = torch.empty(Tq, Hq, Dh, dtype=q.dtype, device=q.device)
    for first in range(0, Tq, tile):
        # 1. Take a tile of R queries and scale it. Join the G query heads that share a key head.
        rows = q[first : first + tile].float() * Dh**-0.5  # [R, Hq, Dh]
        R = len(rows)
        rows = rows.view(R, Hkv, G, Dh).permute(1, 2, 0, 3).reshape(Hkv, G * R, Dh)
        position = past + torch.arange(first, first + R, device=q.device)  # [R]: of each query
        softmax = RunningSoftmax(Hkv, G * R, Dh, q.device)
        # 2. Take the keys that these queries see. The first tile has key 0, which every query sees.
        for start in range(0, past + first + R, tile):
            end = min(start + tile, past + first + R)
            keys, values = (x[start:end].transpose(0, 1).float() for x in (k, v))  # [Hkv, N, Dh]
            scores = rows @ keys.transpose(1, 2)  # [Hkv, G·R, N]
            # 3. Hide the future, if this tile has a key that its first query may not see.
            if end - 1 > past + first:
                future = torch.arange(start, end, device=q.device) > position[:, None]  # [R, N]
                scores.view(Hkv, G, R, -1).masked_fill_(future, -torch.inf)
            softmax.add(scores, values)
        # 4. Move the heads back to their axis.
        mean = softmax.mean().view(Hkv, G, R, Dh).permute(2, 0, 1, 3)  # [R, Hkv, G, Dh]
        out[first : first + R] = mean.reshape(R, Hq, Dh)
    return out


# The `VarlenKernel` (interface.py) that calls `tiled_causal_attention` for one sequence after the other.
tiled_attention = per_sequence(tiled_causal_attention)
