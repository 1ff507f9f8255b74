"""Attention without a matrix of all scores: keys come in tiles, and a running softmax takes them in. Part 9.

Promises `causal_attention` of `dense.py` up to rounding, in memory that grows with the length and not with
its square: TILE queries meet TILE keys at a time, and their scores are forgotten. Plain PyTorch, to be
stepped through; `flash.py` and `engine/kernels/` do the same faster. Sums are kept in fp32 whatever the
type of q, k and v. Sources: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (the running
softmax); Dao et al. 2022, https://arxiv.org/abs/2205.14135 (attention in tiles).
"""

import torch
from torch import Tensor

from engine.attention.varlen import per_sequence

TILE = 128  # queries, and keys, in a tile


class RunningSoftmax:
    """softmax(scores)·values of R rows in each of H heads, whose scores and values arrive in tiles.

    Between two tiles it holds three things for each row: `maximum`, its largest score so far; `total`, the
    sum of exp(score - maximum) over its scores so far; and `weighted`, the same sum with each term times its
    score's value.
    """

    def __init__(self, H: int, R: int, Dh: int, device: torch.device | str = "cpu") -> None:
        self.maximum = torch.full((H, R, 1), -torch.inf, device=device)  # [H, R, 1]
        self.total = torch.zeros(H, R, 1, device=device)  # [H, R, 1]
        self.weighted = torch.zeros(H, R, Dh, device=device)  # [H, R, Dh]

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in one tile: scores[H, R, N] and its keys' values[H, N, Dh].

        A score of -inf is a key that the row may not see: it has weight 0. Of its first tile a row sees at
        least one key. No exponential may overflow, however large a score is.
        """
        # 1. The largest score so far. What was summed before was relative to a smaller or equal one...
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))  # [H, R, 1]
        # 2. ...so it shrinks by exp(old - new): exp(s - old) · exp(old - new) = exp(s - new).
        shrink = torch.exp(self.maximum - maximum)  # [H, R, 1]
        # 3. The tile's own terms are relative to the new one.
        weights = torch.exp(scores - maximum)  # [H, R, N]
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.weighted = self.weighted * shrink + weights @ values
        self.maximum = maximum

    def mean(self) -> Tensor:
        """[H, R, Dh]: the mean of all values so far, each by its weight."""
        return self.weighted / self.total


def tiled_causal_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = TILE) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens; none sees a later one.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh], in q's type. Query i stands at position
    Tk - Tq + i. `tile` queries at a time meet the keys from 0 to their last one's own, `tile` at a time,
    with a `RunningSoftmax` for each tile of queries. A tile of keys that lies wholly in the queries' future
    is not computed.
    """
    (Tq, Hq, Dh), (Tk, Hkv, _) = q.shape, k.shape
    G, past = Hq // Hkv, Tk - Tq
    out = torch.empty(Tq, Hq, Dh, dtype=q.dtype, device=q.device)
    for first in range(0, Tq, tile):
        # 1. A tile of R queries, scaled. The G query heads that share a key head stand together.
        rows = q[first : first + tile].float() * Dh**-0.5  # [R, Hq, Dh]
        R = len(rows)
        rows = rows.view(R, Hkv, G, Dh).permute(1, 2, 0, 3).reshape(Hkv, G * R, Dh)
        position = past + torch.arange(first, first + R, device=q.device)  # [R]: where they stand
        softmax = RunningSoftmax(Hkv, G * R, Dh, q.device)
        # 2. The keys they see, from the first on, so that no query's first tile is empty.
        for start in range(0, past + first + R, tile):
            end = min(start + tile, past + first + R)
            keys, values = (x[start:end].transpose(0, 1).float() for x in (k, v))  # [Hkv, N, Dh]
            scores = rows @ keys.transpose(1, 2)  # [Hkv, G·R, N]
            # 3. Only where the tile crosses the diagonal is there a future to hide.
            if end - 1 > past + first:
                future = torch.arange(start, end, device=q.device) > position[:, None]  # [R, N]
                scores.view(Hkv, G, R, -1).masked_fill_(future, -torch.inf)
            softmax.add(scores, values)
        # 4. Heads back to where they were.
        mean = softmax.mean().view(Hkv, G, R, Dh).permute(2, 0, 1, 3)  # [R, Hkv, G, Dh]
        out[first : first + R] = mean.reshape(R, Hq, Dh)
    return out


# The varlen kernel of `interface.py`: one sequence after the other.
tiled_attention = per_sequence(tiled_causal_attention)
