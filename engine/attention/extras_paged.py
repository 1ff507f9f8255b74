"""Attention with extras over keys and values that lie in pages, in PyTorch, on any device. Extension C.

Promises the results of `attention_with` (extras.py) for each sequence alone, for one new token or many. With
a window, only the keys that some query sees are read: pages before them may be somebody else's.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.extras import AttentionExtras, attention_with, first_visible, visible, weights_of
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


class _Singles(NamedTuple):
    """The sequences with one new token each, as rows of one matrix."""

    rows: Tensor  # [N]: which of the T queries they are
    places: Tensor  # [N · longest]: where the keys of each lie; its first key again is padding
    seen: Tensor  # [N, 1, 1, longest]: False for padding


class _Several(NamedTuple):
    """A sequence with several new tokens, or one alone."""

    rows: slice
    places: Tensor  # [Tk]: where the keys that a query of the sequence sees lie
    seen: Tensor  # [Tq, Tk]


class GatheredWithExtras:
    """The `ExtrasPlan` that copies the keys and values that are seen. What is the same in every layer with
    the same window is computed once.
    """

    def __init__(self, pages: Pages, query_start: tuple[int, ...], keys: Tensor) -> None:
        self.pages, self.query_start, self.device = pages, query_start, keys.device
        self._by_window: dict[int | None, tuple[_Singles | None, list[_Several]]] = {}

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras) -> Tensor:
        if extras.window not in self._by_window:
            self._by_window[extras.window] = self._parts(extras.window)
        singles, several = self._by_window[extras.window]
        out = torch.empty_like(q)  # [T, Hq, Dh]
        if singles is not None:
            out[singles.rows] = _attend_singles(q[singles.rows], keys, values, extras, singles)
        for rows, places, seen in several:
            k, v = gather(keys, places), gather(values, places)  # [Tk, Hkv, Dh] each
            out[rows] = _attend_several(q[rows], k, v, extras, seen)
        return out

    def _parts(self, window: int | None) -> tuple[_Singles | None, list[_Several]]:
        num_new, lens = np.diff(self.query_start), self.pages.lens  # [S] each
        first = np.array(
            [first_visible(int(n - new), window) for n, new in zip(lens, num_new, strict=True)]
        )  # [S]: the first key that a query of the sequence sees
        single = num_new == 1  # [S]
        if single.sum() < 2:  # for one sequence, a matrix of rows is a detour
            single[:] = False
        several = []
        for s in np.flatnonzero(~single).tolist():
            positions = np.arange(first[s], lens[s])  # [Tk]
            (places,) = on_device(self.device, self.pages.places(np.full_like(positions, s), positions))
            keys = torch.arange(int(first[s]), int(lens[s]), device=self.device)
            seen = visible(keys[-int(num_new[s]) :, None], keys, window)  # [Tq, Tk]
            several.append(_Several(slice(*self.query_start[s : s + 2]), places, seen))
        return self._singles(np.flatnonzero(single), first) if single.any() else None, several

    def _singles(self, sequences: np.ndarray, first: np.ndarray) -> _Singles:
        counts = self.pages.lens[sequences] - first[sequences]  # [N]: keys that each row sees
        column = np.broadcast_to(np.arange(counts.max()), (len(counts), counts.max()))  # [N, longest]
        is_key = column < counts[:, None]  # [N, longest]
        positions = first[sequences][:, None] + np.where(is_key, column, 0)
        key_places = self.pages.places(sequences[:, None], positions)
        row_numbers = np.array(self.query_start)[sequences]  # [N]
        rows, places, seen = on_device(self.device, row_numbers, key_places.ravel(), is_key.ravel())
        return _Singles(rows, places, seen.bool().view(len(counts), 1, 1, -1))


def _attend_singles(
    q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras, singles: _Singles
) -> Tensor:
    """q[N, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [N, Hq, Dh]."""
    (N, Hq, Dh), Hkv = q.shape, keys.shape[2]
    # [N, Hkv, longest, Dh] each
    k, v = (gather(x, singles.places).view(N, -1, Hkv, Dh).transpose(1, 2) for x in (keys, values))
    scale = Dh**-0.5 if extras.scale is None else extras.scale
    queries = (q * scale).view(N, Hkv, Hq // Hkv, Dh)  # grouped by the key head that they share
    scores = (queries @ k.transpose(2, 3)).view(N, Hq, 1, -1)  # [N, Hq, 1, longest]
    weights = weights_of(scores, singles.seen, extras).to(v.dtype)
    return (weights.view(N, Hkv, Hq // Hkv, -1) @ v).view(N, Hq, Dh)


def _attend_several(q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras, seen: Tensor) -> Tensor:
    """q[Tq, Hq, Dh], k and v[Tk, Hkv, Dh], seen[Tq, Tk] -> [Tq, Hq, Dh].

    PyTorch's own attention knows masks and scales, and neither soft caps nor sinks.
    """
    if extras.softcap is not None or extras.sinks is not None:
        return attention_with(q, k, v, extras)
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, tokens, Dh]
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=extras.scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
