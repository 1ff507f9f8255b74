"""Attention of many sequences with one new token each, at the price of one call. Part 6.

Promises what a call per sequence would give. Each call has a price of its own, whatever its size; and one
product over all slots would read each of them as far as the longest. So a CPU, where reading is dear, gets
`Ragged`: the scores of everybody form one sparse matrix, in which each query meets its own keys alone. A GPU,
where a call is dear, gets `Padded`: all slots to the longest, with a mask.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Attend
from engine.machine.device import on_device


def side_by_side(parts: Sequence[tuple[slice | Tensor, Attend]]) -> Attend:
    """One `attend` of several: each has some of the T rows of a step, all of them together have all T."""
    if len(parts) == 1:
        return parts[0][1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # [T, Hq, Dh]
        for rows, attend_rows in parts:
            out[rows] = attend_rows(layer, q[rows], k[rows], v[rows])
        return out

    return attend


class Together(Protocol):
    """One step's plan: which slots, and how many tokens of each. The same for every layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh], or pages [B, P, Hkv, Dh] (Part 12) -> [S, Hq, Dh]."""


def together(slots: Sequence[int], lens: Sequence[int], num_heads: int, cache: Tensor) -> Together:
    """The plan for this kind of memory. Sequence s holds `lens[s]` tokens in slot `slots[s]` of a
    cache[N, Hkv, M, Dh]; it has `num_heads` query heads.
    """
    if not reads_only_its_own(cache):
        return Padded(slots, lens, cache)
    _, Hkv, M, _ = cache.shape
    lengths = np.asarray(lens)  # [S]
    before = lengths.cumsum() - lengths  # [S]: tokens of the sequences before
    token = np.arange(lengths.sum()) + (np.array(slots) * Hkv * M - before).repeat(lengths)
    return Ragged(token, lengths, num_heads, Hkv, M, cache)


def reads_only_its_own(cache: Tensor) -> bool:
    """False: what another sequence left behind is read, though masked, so it must not be NaN."""
    return cache.device.type == "cpu" and cache.dtype == torch.float32


class Ragged:
    """As a graph library would: a sampled product of dense matrices (SDDMM), a softmax of each row, and a
    weighted sum of each row's values (an embedding bag).
    """

    def __init__(
        self,
        token: np.ndarray,
        lens: Sequence[int] | np.ndarray,
        num_heads: int,
        num_kv_heads: int,
        head_stride: int,
        cache: Tensor,
    ) -> None:
        """Keys and values are rows of cache.view(-1, Dh), wherever they lie: token[sum of lens] gives that of
        each token's first head, sequence by sequence; the next head's is `head_stride` further. lens[S].
        """
        _swallow_beta_warning()
        lengths, Dh = np.asarray(lens), cache.shape[-1]
        B, longest = len(lengths) * num_heads, int(lengths.max())
        row = np.arange(B)  # of scores: one for each query head of each sequence, all end to end
        length = lengths.repeat(num_heads)  # [B]
        end = length.cumsum()
        start, score = end - length, np.arange(end[-1])  # [B], [scores]
        # Where each score's key lies: its sequence's tokens in order, in the row's head.
        head = row % num_heads // (num_heads // num_kv_heads) * head_stride
        first_token = (lengths.cumsum() - lengths).repeat(num_heads)
        key = token[score + (first_token - start).repeat(length)] + head.repeat(length)
        # Where it stands in the padded matrix of the softmax, [B, longest].
        place = score + (row * longest - start).repeat(length)
        self.scale = Dh**-0.5
        self.start, self.key, self.place = map(torch.from_numpy, (start, key, place))
        # Both are filled anew in every layer. In the padded matrix, what no score belongs to stays -inf.
        self.padded = torch.full((B, longest), -torch.inf)
        self.scores = torch.sparse_csr_tensor(
            torch.from_numpy(np.append(start, end[-1])),
            self.key,
            torch.zeros(len(key)),
            (B, cache.numel() // Dh),
            check_invariants=False,
        )

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values as `cache` was -> [S, Hq, Dh]"""
        Dh = q.shape[-1]
        rows, keys, values = (x.reshape(-1, Dh) for x in (q, keys, values))  # copies nothing of the cache
        # Its last values count 0 times (`beta`).
        torch.sparse.sampled_addmm(self.scores, rows, keys.t(), beta=0, alpha=self.scale, out=self.scores)
        self.padded.view(-1).scatter_(0, self.place, self.scores.values())
        weights = self.padded.softmax(-1).view(-1).index_select(0, self.place)
        bags = self.key, self.start
        out = torch.embedding_bag(values, *bags, mode=0, per_sample_weights=weights)[0]  # [B, Dh]; 0: the sum
        return out.view(q.shape)


@cache
def _swallow_beta_warning() -> None:
    """Torch warns of sparse tensors when a process makes its first one. So that is made here, and the warning
    ignored: `Ragged` is made in every step, and would pay for a filter each time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        indices = torch.tensor([0, 1]), torch.tensor([0])
        torch.sparse_csr_tensor(*indices, torch.ones(1), (1, 1), check_invariants=False)


class Padded:
    """Every slot from the lowest to the highest, as far as the longest sequence reaches."""

    def __init__(self, slots: Sequence[int], lens: Sequence[int], cache: Tensor) -> None:
        """slots[S], lens[S], cache[N, Hkv, M, Dh]"""
        self.low, self.longest = min(slots), max(lens)
        # An idle slot sees one key: softmax of nothing is none.
        lengths = np.ones(max(slots) + 1 - self.low, dtype=int)  # [N]
        place = np.array(slots) - self.low
        lengths[place] = lens
        self.place, seen = on_device(cache.device, place, lengths)  # [S], [N]
        beyond = torch.arange(self.longest, device=cache.device) >= seen[:, None]  # [N, longest]
        mask = torch.zeros(beyond.shape, dtype=cache.dtype, device=cache.device)
        self.mask = mask.masked_fill_(beyond, -torch.inf)[:, None, None]  # [N, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh] -> [S, Hq, Dh]"""
        N, (_, Hq, Dh), Hkv = len(self.mask), q.shape, keys.shape[1]
        k, v = (cache[self.low : self.low + N, :, : self.longest] for cache in (keys, values))  # views
        queries = q.new_zeros(N, Hq, Dh)
        queries[self.place] = q * Dh**-0.5
        scores = queries.view(N, Hkv, -1, Dh) @ k.transpose(2, 3) + self.mask  # [N, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(N, Hq, Dh)[self.place]
