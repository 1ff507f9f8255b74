"""Decode attention over slots: one new token of each of many sequences, attended by one plan. Part 6.

Promises what a call per sequence would give. Such calls cost their overhead for every sequence, in every
layer. One product over all slots has one call, and reads each slot as far as the longest sequence reaches. So
there are two plans. On a CPU, where reading memory is slow, `Ragged`: the scores are one sparse matrix, with
each query's scores for the keys of its own sequence alone. On a GPU, where calls are slow, `Padded`: all
slots as far as the longest sequence, with a mask.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Attend
from engine.machine.device import on_device


def combined_attend(parts: Sequence[tuple[slice | Tensor, Attend]]) -> Attend:
    """One `attend` made of several. `parts`: (rows, their attend); each of a step's T rows is in one part."""
    if len(parts) == 1:
        return parts[0][1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # [T, Hq, Dh]
        for rows, attend_rows in parts:
            out[rows] = attend_rows(layer, q[rows], k[rows], v[rows])
        return out

    return attend


class AttentionPlan(Protocol):
    """Attention over cached keys and values. Made once per step, called in every layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh], or pages [B, P, Hkv, Dh] (Part 12) -> [S, Hq, Dh]."""


def plan_decode(slots: Sequence[int], lens: Sequence[int], num_heads: int, keys: Tensor) -> AttentionPlan:
    """The plan for one new token each of S sequences: sequence s holds `lens[s]` tokens in slot `slots[s]`.

    `num_heads`: query heads. `keys`: any layer's, [N, Hkv, M, Dh]: N slots of M tokens.
    """
    if not supports_ragged(keys):
        return Padded(slots, lens, keys)
    _, Hkv, M, _ = keys.shape
    lengths = np.asarray(lens)  # [S]
    first_token = lengths.cumsum() - lengths  # [S]: tokens of the sequences before
    slot_row = np.array(slots) * Hkv * M  # [S]: where each slot begins, in rows of Dh numbers
    token_rows = np.arange(lengths.sum()) + (slot_row - first_token).repeat(lengths)  # [sum of lens]
    return Ragged(token_rows, lengths, num_heads, Hkv, M, keys)


def supports_ragged(keys: Tensor) -> bool:
    """Whether `Ragged` computes over this memory: fp32 on a CPU. The other plans also read, and mask, what
    finished sequences have left behind in the memory. A mask does not hide NaN: so there must be none.
    """
    return keys.device.type == "cpu" and keys.dtype == torch.float32


class Ragged:
    """Reads each sequence's own keys and values only, in three calls that graph libraries use: a sampled
    product of dense matrices (SDDMM) for the scores, a softmax of each row of scores, and a weighted sum of
    each row's values (an embedding bag).

    There are R = S · Hq rows of scores, one for each query head of each sequence, and K scores in all: each
    row has as many as its sequence has tokens.
    """

    def __init__(
        self,
        token_rows: np.ndarray,
        lens: Sequence[int] | np.ndarray,
        num_heads: int,
        num_kv_heads: int,
        head_stride: int,
        keys: Tensor,
    ) -> None:
        """token_rows[sum of lens]: the row of keys.view(-1, Dh) with each token's first head, sequence by
        sequence; the next head's row is `head_stride` further. lens[S]. `keys`: any layer's.
        """
        _swallow_beta_warning()
        lengths, Dh = np.asarray(lens), keys.shape[-1]
        longest = int(lengths.max())  # tokens
        # 1. Where each row's scores are among all of them, end to end.
        row = np.arange(len(lengths) * num_heads)  # [R]
        row_length = lengths.repeat(num_heads)  # [R]: how many scores it has
        row_end = row_length.cumsum()  # [R]
        row_start = row_end - row_length  # [R]
        score = np.arange(row_end[-1])  # [K]
        # 2. The key of each score: its sequence's tokens in order, at the key head that serves the row.
        first_token = (lengths.cumsum() - lengths).repeat(num_heads)  # [R]: tokens of the sequences before
        token = score + (first_token - row_start).repeat(row_length)  # [K]: indices of token_rows
        kv_head = row % num_heads // (num_heads // num_kv_heads)  # [R]
        key_row = token_rows[token] + (kv_head * head_stride).repeat(row_length)  # [K]
        # 3. Where each score goes in the matrix of the softmax, [R, longest], seen as one list.
        padded_index = score + (row * longest - row_start).repeat(row_length)  # [K]
        self.scale = Dh**-0.5
        self.row_start, self.key_row, self.padded_index = map(
            torch.from_numpy, (row_start, key_row, padded_index)
        )
        # `padded` and `scores` are filled anew in every layer. Entries of `padded` without a score stay -inf.
        self.padded = torch.full((len(row), longest), -torch.inf)  # [R, longest]
        self.scores = torch.sparse_csr_tensor(  # [R, rows of keys], of which K are filled
            torch.from_numpy(np.append(row_start, row_end[-1])),
            self.key_row,
            torch.zeros(len(key_row)),
            (len(row), keys.numel() // Dh),
            check_invariants=False,
        )

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values in the shape of `__init__`'s `keys` -> [S, Hq, Dh]"""
        Dh = q.shape[-1]
        queries, keys, values = (x.reshape(-1, Dh) for x in (q, keys, values))  # no key or value is copied
        # 1. K scores. `beta=0`: what `scores` held in the last layer is not added.
        torch.sparse.sampled_addmm(self.scores, queries, keys.t(), beta=0, alpha=self.scale, out=self.scores)
        # 2. The softmax of each row.
        self.padded.view(-1).scatter_(0, self.padded_index, self.scores.values())
        weights = self.padded.softmax(-1).view(-1).index_select(0, self.padded_index)  # [K]
        # 3. The sum (mode 0) of each row's values, each by its weight.
        bags = torch.embedding_bag(values, self.key_row, self.row_start, mode=0, per_sample_weights=weights)
        return bags[0].view(q.shape)  # [R, Dh] -> [S, Hq, Dh]


@functools.cache
def _swallow_beta_warning() -> None:
    """Make this process's first sparse tensor with torch's warning ignored: torch warns at the first one
    alone. `Ragged` is made in every step, and a filter there would cost time in each.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        indices = torch.tensor([0, 1]), torch.tensor([0])
        torch.sparse_csr_tensor(*indices, torch.ones(1), (1, 1), check_invariants=False)


class Padded:
    """Reads every slot from the lowest to the highest in use, W of them, as far as the longest sequence
    reaches, and masks what is behind each sequence's end.
    """

    def __init__(self, slots: Sequence[int], lens: Sequence[int], keys: Tensor) -> None:
        """slots[S], lens[S]; `keys`: any layer's, [N, Hkv, M, Dh]."""
        self.first_slot, self.longest = min(slots), max(lens)
        slot_index = np.array(slots) - self.first_slot  # [S]: among the W slots
        # An idle slot shows one key: the softmax of a row without any would be NaN.
        slot_lens = np.ones(max(slots) + 1 - self.first_slot, dtype=int)  # [W]
        slot_lens[slot_index] = lens
        self.slot_index, num_visible = on_device(keys.device, slot_index, slot_lens)  # [S], [W]
        hidden = torch.arange(self.longest, device=keys.device) >= num_visible[:, None]  # [W, longest]
        mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        self.mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]  # [W, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh] -> [S, Hq, Dh]"""
        W, (_, Hq, Dh), Hkv = len(self.mask), q.shape, keys.shape[1]
        window = slice(self.first_slot, self.first_slot + W)
        k, v = (x[window, :, : self.longest] for x in (keys, values))  # [W, Hkv, longest, Dh]: views
        queries = q.new_zeros(W, Hq, Dh)
        queries[self.slot_index] = q * Dh**-0.5
        scores = queries.view(W, Hkv, -1, Dh) @ k.transpose(2, 3) + self.mask  # [W, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(W, Hq, Dh)[self.slot_index]
