"""Decode attention over slots: one plan attends for one new token of each of S sequences. Part 7.

Promises the results of one call per sequence, up to rounding. Those would be S calls in each layer, and each
call has a fixed cost. There are two plans with fewer calls:

- `Ragged`, for a CPU, where reading memory is slow. Each query reads the keys of its own sequence only. The
  scores form one sparse matrix.
- `Padded`, for a GPU, where calls are slow. One product reads every slot up to the length of the longest
  sequence, and a mask hides the rest.
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
    """One `Attend` that calls several, each for its own rows of the step.

    `parts` has (rows, attend) pairs. `rows` is a slice or an index tensor. Each of the step's T rows belongs
    to exactly one part.
    """
    if len(parts) == 1:
        _, attend_all = parts[0]
        return attend_all

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # [T, Hq, Dh]
        for rows, attend_rows in parts:
            out[rows] = attend_rows(layer, q[rows], k[rows], v[rows])
        return out

    return attend


class AttentionPlan(Protocol):
    """Attention over cached keys and values. A step makes one plan and calls the plan in every layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh] and a layer's keys and values -> [S, Hq, Dh].

        Keys and values are slots [N, Hkv, M, Dh], or pages [B, P, Hkv, Dh] (Part 12).
        """


def plan_decode(slots: Sequence[int], lens: Sequence[int], num_heads: int, keys: Tensor) -> AttentionPlan:
    """The plan for one new token of each of S sequences. Sequence s has lens[s] tokens in slot slots[s].

    `num_heads` is Hq. `keys` are the keys of any layer: [N, Hkv, M, Dh], N slots of M tokens. Their device
    and dtype decide which plan it is.
    """
    if not supports_ragged(keys):
        return Padded(slots, lens, keys)
    _, Hkv, M, _ = keys.shape
    lengths = np.asarray(lens)  # [S]
    first_token = lengths.cumsum() - lengths  # [S]: the number of tokens in earlier sequences
    slot_row = np.array(slots) * Hkv * M  # [S]: the first row of each slot, in keys.view(-1, Dh)
    # [sum of lens]: slot_row, plus the token's position in its sequence.
    token_rows = np.arange(lengths.sum()) + (slot_row - first_token).repeat(lengths)
    return Ragged(token_rows, lengths, num_heads, Hkv, M, keys)


def supports_ragged(keys: Tensor) -> bool:
    """Whether `Ragged` can read these keys: they must be fp32 on a CPU.

    Where this is False, the memory must be free of NaN: `Padded` also reads what finished sequences have left
    in the memory, and masks it, but a mask does not hide NaN.
    """
    return keys.device.type == "cpu" and keys.dtype == torch.float32


class Ragged:
    """The `AttentionPlan` that reads only the keys and values of each query's own sequence.

    It takes three operations that are common in graph libraries: a sampled product of dense matrices (SDDMM)
    for the scores, a softmax of each row of scores, and a weighted sum of each row's values (an embedding
    bag). There are R = S · Hq rows of scores, one for each query head of each sequence. A row has one score
    for each token of its sequence. K is the number of scores in all rows together.
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
        """Plan for S sequences of lens[S] tokens.

        token_rows[sum of lens] is, for each token of each sequence in order, the row of keys.view(-1, Dh)
        that holds the key of the token's first head. The key of the next head is `head_stride` rows further.
        `num_heads` is Hq, `num_kv_heads` is Hkv, and `keys` are the keys of any layer.
        """
        _swallow_beta_warning()
        lengths, Dh = np.asarray(lens), keys.shape[-1]
        longest = int(lengths.max())  # tokens
        # 1. The scores of all rows lie end to end. Find where the scores of each row begin.
        row = np.arange(len(lengths) * num_heads)  # [R]
        row_length = lengths.repeat(num_heads)  # [R]: how many scores it has
        row_end = row_length.cumsum()  # [R]
        row_start = row_end - row_length  # [R]
        # A score of a row belongs to the token at position score - row_start of the row's sequence.
        score = np.arange(row_end[-1])  # [K]
        # 2. Find the key of each score. A row's keys are those of its sequence's tokens, in order, at the key
        #    head that its query head uses.
        first_token = (lengths.cumsum() - lengths).repeat(num_heads)  # [R]: tokens of earlier sequences
        token = score + (first_token - row_start).repeat(row_length)  # [K]: first_token + position
        kv_head = row % num_heads // (num_heads // num_kv_heads)  # [R]
        key_row = token_rows[token] + (kv_head * head_stride).repeat(row_length)  # [K]
        # 3. Find the place of each score in `padded`, the matrix of the softmax, flattened.
        padded_index = score + (row * longest - row_start).repeat(row_length)  # [K]: row · longest + position
        self.scale = Dh**-0.5
        self.row_start, self.key_row = torch.from_numpy(row_start), torch.from_numpy(key_row)
        self.padded_index = torch.from_numpy(padded_index)
        # Every layer overwrites the scores in both tensors. Entries of `padded` without a score stay -inf.
        self.padded = torch.full((len(row), longest), -torch.inf)  # [R, longest]
        self.scores = torch.sparse_csr_tensor(  # [R, rows of keys.view(-1, Dh)] with K entries
            torch.from_numpy(np.append(row_start, row_end[-1])),
            self.key_row,
            torch.zeros(len(key_row)),
            (len(row), keys.numel() // Dh),
            check_invariants=False,
        )

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], and keys and values in the shape of `__init__`'s `keys` -> [S, Hq, Dh]."""
        Dh = q.shape[-1]
        queries = q.reshape(-1, Dh)  # [R, Dh]
        keys, values = keys.reshape(-1, Dh), values.reshape(-1, Dh)  # views
        # 1. The K scores. With beta=0, the scores of the previous layer are overwritten, not added to.
        torch.sparse.sampled_addmm(self.scores, queries, keys.t(), beta=0, alpha=self.scale, out=self.scores)
        # 2. The softmax of each row.
        self.padded.view(-1).scatter_(0, self.padded_index, self.scores.values())
        weights = self.padded.softmax(-1).view(-1).index_select(0, self.padded_index)  # [K]
        # 3. The weighted sum (mode 0) of each row's values. The other results are for a backward pass.
        sums, *_ = torch.embedding_bag(
            values, self.key_row, self.row_start, mode=0, per_sample_weights=weights
        )  # [R, Dh]
        return sums.view(q.shape)  # [S, Hq, Dh]


@functools.cache
def _swallow_beta_warning() -> None:
    """Make the first sparse tensor of this process, and ignore torch's warning about it.

    Torch warns about the first sparse tensor only. To set a warning filter in each `Ragged` would cost time
    in every step.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        indices = torch.tensor([0, 1]), torch.tensor([0])
        torch.sparse_csr_tensor(*indices, torch.ones(1), (1, 1), check_invariants=False)


class Padded:
    """The `AttentionPlan` that reads the W slots from the lowest to the highest slot in use.

    It reads each slot up to the length of the longest sequence, and masks what follows a sequence's end.
    """

    def __init__(self, slots: Sequence[int], lens: Sequence[int], keys: Tensor) -> None:
        """Plan for S sequences: sequence s has lens[s] tokens in slot slots[s].

        `keys` are the keys of any layer, [N, Hkv, M, Dh].
        """
        self.first_slot, self.longest = min(slots), max(lens)
        slot_index = np.array(slots) - self.first_slot  # [S]: of each sequence's slot among the W slots
        # One key of an idle slot is visible, because the softmax of a row without visible keys would be NaN.
        slot_lens = np.ones(max(slots) + 1 - self.first_slot, dtype=int)  # [W]
        slot_lens[slot_index] = lens
        self.slot_index, num_visible = on_device(keys.device, slot_index, slot_lens)  # [S], [W]
        hidden = torch.arange(self.longest, device=keys.device) >= num_visible[:, None]  # [W, longest]
        mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        self.mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]  # [W, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[N, Hkv, M, Dh] -> [S, Hq, Dh]."""
        _, Hq, Dh = q.shape
        W, Hkv = len(self.mask), keys.shape[1]
        slots = slice(self.first_slot, self.first_slot + W)
        k, v = keys[slots, :, : self.longest], values[slots, :, : self.longest]  # [W, Hkv, longest, Dh]
        queries = q.new_zeros(W, Hq, Dh)
        queries[self.slot_index] = q * Dh**-0.5
        scores = queries.view(W, Hkv, -1, Dh) @ k.transpose(2, 3) + self.mask  # [W, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(W, Hq, Dh)[self.slot_index]
