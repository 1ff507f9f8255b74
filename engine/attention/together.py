"""Attention of many sequences with one new token each, at the price of one call. Part 6.

Promises what a call per sequence would give. Each call has a price of its own, whatever its size; and one
product over all slots would read each of them as far as the longest. So a CPU, where reading is dear, gets
`Ragged`: the scores of everybody form one sparse matrix, in which each query meets its own keys alone. A GPU,
where a call is dear, gets `Padded`: all slots to the longest, with a mask.
"""

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


class Together(Protocol):
    """One step's plan: which slots, and how many tokens of each. The same for every layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh] -> [S, Hq, Dh]."""


def together(slots: Sequence[int], lens: Sequence[int], num_heads: int, cache: Tensor) -> Together:
    """Sequence s holds `lens[s]` tokens in slot `slots[s]` of a cache[N, Hkv, M, Dh]; it has `num_heads`
    query heads.
    """
    return (Ragged if reads_only_its_own(cache) else Padded)(slots, lens, num_heads, cache)


def reads_only_its_own(cache: Tensor) -> bool:
    """False: what another sequence left behind is read, though masked, so it must not be NaN."""
    return cache.device.type == "cpu" and cache.dtype == torch.float32


class Ragged:
    """As a graph library would: a sampled product of dense matrices (SDDMM), a softmax of each row, and a
    weighted sum of each row's values (an embedding bag).
    """

    def __init__(self, slots: Sequence[int], lens: Sequence[int], num_heads: int, cache: Tensor) -> None:
        N, Hkv, M, Dh = cache.shape
        self.scale, self.padded_size = Dh**-0.5, (len(slots) * num_heads, max(lens))  # B = S·Hq rows
        # Row b is one query head. Its keys lie at first_key[b] and after, in cache.view(N·Hkv·M, Dh).
        key_head = np.arange(num_heads) // (num_heads // Hkv)  # [Hq]
        first_key = ((np.array(slots)[:, None] * Hkv + key_head) * M).ravel()  # [B]
        length = np.repeat(lens, num_heads)  # [B]
        row_start = np.concatenate([[0], length.cumsum()])  # [B+1]: its scores, all rows end to end
        # Shifting 0, 1, 2... row by row gives where each score's key lies, and its place in a padded matrix.
        score = np.arange(row_start[-1])
        key = score + np.repeat(first_key - row_start[:-1], length)
        place = score + np.repeat(np.arange(len(length)) * max(lens) - row_start[:-1], length)
        self.row_start, self.key, self.place = map(torch.from_numpy, (row_start, key, place))
        nothing, size = torch.zeros(len(score)), (len(length), N * Hkv * M)
        self.pattern = torch.sparse_csr_tensor(
            self.row_start, self.key, nothing, size, check_invariants=False
        )

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        Dh = q.shape[-1]
        rows, keys, values = (
            q.reshape(-1, Dh),
            keys.view(-1, Dh),
            values.view(-1, Dh),
        )  # [B, Dh], [N·Hkv·M, Dh]
        scores = torch.sparse.sampled_addmm(self.pattern, rows, keys.t(), beta=0, alpha=self.scale).values()
        padded = torch.full(self.padded_size, -torch.inf).view(-1).scatter_(0, self.place, scores)
        weights = padded.view(self.padded_size).softmax(-1).view(-1).gather(0, self.place)
        bags = self.key, self.row_start[:-1]
        out = torch.embedding_bag(values, *bags, mode=0, per_sample_weights=weights)[0]  # [B, Dh]; 0: the sum
        return out.view(q.shape)


class Padded:
    """Every slot from the lowest to the highest, as far as the longest sequence reaches."""

    def __init__(self, slots: Sequence[int], lens: Sequence[int], num_heads: int, cache: Tensor) -> None:
        self.low, self.longest = min(slots), max(lens)
        N = max(slots) + 1 - self.low
        place = torch.tensor(slots) - self.low
        own = torch.ones(N, dtype=torch.long)  # an idle slot sees one key: a softmax of nothing is no number
        own[place] = torch.tensor(lens)
        mask = torch.zeros(N, self.longest).masked_fill_(
            torch.arange(self.longest) >= own[:, None], -torch.inf
        )
        self.place, self.mask = (
            place.to(cache.device),
            mask[:, None, None].to(cache),
        )  # [S], [N, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        N, (_, Hq, Dh), Hkv = len(self.mask), q.shape, keys.shape[1]
        k, v = (cache[self.low : self.low + N, :, : self.longest] for cache in (keys, values))  # views
        queries = q.new_zeros(N, Hq, Dh)
        queries[self.place] = q * Dh**-0.5
        scores = queries.view(N, Hkv, -1, Dh) @ k.transpose(2, 3) + self.mask  # [N, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(N, Hq, Dh)[self.place]
