"""Attention with extras over keys and values that lie in pages, in PyTorch, on any device. Extension C.

Promises the results of `dense_extras_attention` (extras.py) for each sequence alone, for one new token or
many. With a window, only keys that some query sees are read: the pages before them may belong to other
sequences by now.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.extras import (
    AttentionExtras,
    dense_extras_attention,
    first_visible,
    visible,
    weights_of,
)
from engine.attention.paged import Pages, gather
from engine.machine.device import on_device


class ExtrasPlan(Protocol):
    """The attention of one step over pages, which all layers use, each with its extras."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras) -> Tensor:
        """q[T, Hq, Dh], a layer's keys and values[B, P, Hkv, Dh] -> [T, Hq, Dh]. The step's new keys and
        values are stored already.
        """


# plan = make(pages, query_start[S+1], keys): the plan of a step in which sequence s has the queries
# query_start[s]:query_start[s+1], its last tokens. `keys` are the keys of any layer.
MakeExtrasPlan = Callable[[Pages, tuple[int, ...], Tensor], ExtrasPlan]


class _DecodeRows(NamedTuple):
    """N sequences with one new token each. Their queries are rows of one matrix."""

    rows: Tensor  # [N]: the indices of their queries among the T queries of the step
    places: Tensor  # [N · longest]: where the keys of each row lie, padded with the place of its first key
    seen: Tensor  # [N, 1, 1, longest]: False for padding


class _OneSequence(NamedTuple):
    """A sequence that is attended alone: it has several new tokens, or is the only one with a single one."""

    rows: slice  # its Tq queries among the T queries of the step
    places: Tensor  # [Tk]: where the keys lie that at least one of its queries sees
    seen: Tensor  # [Tq, Tk]: which of these keys each query sees


class _StepSplit(NamedTuple):
    """The sequences of a step, by how they are attended."""

    decode_rows: _DecodeRows | None  # together, as rows of one matrix; None if there are none
    sequences: list[_OneSequence]  # one by one


class GatheredWithExtras:
    """The `ExtrasPlan` that copies the keys and values that are seen. What is the same in every layer with
    the same window is computed once.
    """

    def __init__(self, pages: Pages, query_start: tuple[int, ...], keys: Tensor) -> None:
        """The arguments are those of `MakeExtrasPlan`."""
        self.pages, self.query_start, self.device = pages, query_start, keys.device
        self._by_window: dict[int | None, _StepSplit] = {}

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras) -> Tensor:
        """As in `ExtrasPlan`: q[T, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [T, Hq, Dh]."""
        if extras.window not in self._by_window:
            self._by_window[extras.window] = self._split(extras.window)
        decode_rows, sequences = self._by_window[extras.window]
        out = torch.empty_like(q)  # [T, Hq, Dh]
        if decode_rows is not None:
            decode_q = q[decode_rows.rows]  # [N, Hq, Dh]
            out[decode_rows.rows] = _attend_decode_rows(decode_q, keys, values, extras, decode_rows)
        for sequence in sequences:
            k, v = gather(keys, sequence.places), gather(values, sequence.places)  # [Tk, Hkv, Dh] each
            out[sequence.rows] = _attend_one_sequence(q[sequence.rows], k, v, extras, sequence.seen)
        return out

    def _split(self, window: int | None) -> _StepSplit:
        """Which sequences are attended together, and which one by one, and what they see."""
        num_new, lens = np.diff(self.query_start), self.pages.lens  # [S] each
        # [S]: the position of the first key that a query of the sequence sees.
        first_key = np.array([first_visible(int(position), window) for position in lens - num_new])
        is_decode = num_new == 1  # [S]
        if is_decode.sum() == 1:  # a matrix of one row would only cost time
            is_decode[:] = False
        sequences = []
        for s in np.flatnonzero(~is_decode).tolist():  # one by one
            first, end = int(first_key[s]), int(lens[s])
            positions = np.arange(first, end)  # [Tk]
            (places,) = on_device(self.device, self.pages.places(np.full_like(positions, s), positions))
            key_positions = torch.arange(first, end, device=self.device)  # [Tk]
            query_positions = key_positions[-int(num_new[s]) :, None]  # [Tq, 1]
            seen = visible(query_positions, key_positions, window)  # [Tq, Tk]
            rows = slice(self.query_start[s], self.query_start[s + 1])
            sequences.append(_OneSequence(rows, places, seen))
        decode_rows = None
        if is_decode.any():
            decode_rows = self._decode_rows(np.flatnonzero(is_decode), first_key)
        return _StepSplit(decode_rows, sequences)

    def _decode_rows(self, indices: np.ndarray, first_key: np.ndarray) -> _DecodeRows:
        """The rows of the sequences indices[N]. first_key[S] is as in `_split`."""
        counts = self.pages.lens[indices] - first_key[indices]  # [N]: keys that each row sees
        N, longest = len(counts), counts.max()
        column = np.broadcast_to(np.arange(longest), (N, longest))  # [N, longest]
        is_key = column < counts[:, None]  # [N, longest]: False for padding
        positions = first_key[indices][:, None] + np.where(is_key, column, 0)  # [N, longest]
        key_places = self.pages.places(indices[:, None], positions)  # [N, longest]
        row_indices = np.array(self.query_start)[indices]  # [N]
        # One copy for all three. It converts the booleans to integers, so they are converted back.
        rows, places, seen = on_device(self.device, row_indices, key_places.ravel(), is_key.ravel())
        return _DecodeRows(rows, places, seen.bool().view(N, 1, 1, -1))


def _attend_decode_rows(
    q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras, decode_rows: _DecodeRows
) -> Tensor:
    """q[N, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [N, Hq, Dh]."""
    N, Hq, Dh = q.shape
    Hkv = keys.shape[2]
    places = decode_rows.places
    k = gather(keys, places).view(N, -1, Hkv, Dh).transpose(1, 2)  # [N, Hkv, longest, Dh]
    v = gather(values, places).view(N, -1, Hkv, Dh).transpose(1, 2)  # [N, Hkv, longest, Dh]
    scale = Dh**-0.5 if extras.scale is None else extras.scale
    queries = (q * scale).view(N, Hkv, Hq // Hkv, Dh)  # grouped by the key head that they share
    scores = (queries @ k.transpose(2, 3)).view(N, Hq, 1, -1)  # [N, Hq, 1, longest]
    weights = weights_of(scores, decode_rows.seen, extras).to(v.dtype)  # [N, Hq, 1, longest]
    return (weights.view(N, Hkv, Hq // Hkv, -1) @ v).view(N, Hq, Dh)


def _attend_one_sequence(q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras, seen: Tensor) -> Tensor:
    """q[Tq, Hq, Dh], k and v[Tk, Hkv, Dh], seen[Tq, Tk] -> [Tq, Hq, Dh].

    PyTorch's own attention is faster than `dense_extras_attention`. It supports masks and scales, but neither
    soft caps nor sinks.
    """
    if extras.softcap is not None or extras.sinks is not None:
        return dense_extras_attention(q, k, v, extras)
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, tokens, Dh]
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=extras.scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
