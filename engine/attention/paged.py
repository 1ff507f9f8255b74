"""Attention over keys and values that lie in pages: blocks of P tokens, anywhere in one large memory.

`Pages` says where each sequence's tokens lie. A step's plan is made from them once and takes `(q, keys,
values)` of each layer. On a CPU it reads keys and values where they lie: `PageReader`, in C, if there is a
compiler, else `Ragged` (Part 6). `Gathered` copies each sequence's keys and values into one piece first; it
needs nothing but PyTorch, and every other plan must give what it gives. Part 13 adds a kernel that reads
pages on a GPU. Part 12.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.attention import page_reader
from engine.attention.slot_decode import AttentionPlan, Ragged, supports_ragged
from engine.machine.device import on_device


@dataclass(frozen=True, eq=False)
class Pages:
    """Where S sequences lie. Made once per step, for every layer."""

    tables: np.ndarray  # [S, W]: each sequence's blocks in order; entries behind the last are not read
    lens: np.ndarray  # [S]: tokens of each sequence
    block_size: int  # P
    _by_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    @staticmethod
    def of(tables: Sequence[np.ndarray], lens: Sequence[int], block_size: int) -> "Pages":
        """`tables`: of each sequence its blocks, at least as many as its tokens need. lens[S]: its tokens."""
        num_blocks = [-(-length // block_size) for length in lens]  # [S]: rounded up
        padded = np.zeros((len(tables), max(num_blocks)), dtype=np.int64)  # [S, W]
        for row, table, n in zip(padded, tables, num_blocks, strict=True):
            row[:n] = table[:n]
        return Pages(padded, np.array(lens), block_size)

    def select(self, sequences: np.ndarray) -> "Pages":
        """The pages of some sequences: a mask[S], or their indices."""
        return Pages(self.tables[sequences], self.lens[sequences], self.block_size)

    def places(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Where token `position` of sequence `sequence` lies, both [N]: its block · P + its offset in it."""
        P = self.block_size
        return self.tables[sequence, position // P] * P + position % P

    def all_places(self) -> np.ndarray:
        """[sum of lens]: where every token lies (`places`), sequence by sequence."""
        sequence = np.repeat(np.arange(len(self.lens)), self.lens)  # [sum of lens]: each token's
        start = np.repeat(np.cumsum(self.lens) - self.lens, self.lens)  # [sum of lens]: its sequence's first
        return self.places(sequence, np.arange(len(sequence)) - start)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """tables[S, W] and lens[S] as int32 tensors, copied to the device at the first call only."""
        if device not in self._by_device:
            flat_tables, lens = on_device(device, self.tables.ravel(), self.lens, dtype=torch.int32)
            self._by_device[device] = flat_tables.view(self.tables.shape), lens
        return self._by_device[device]


# Makes the plan for one new token of each of S sequences, from (pages, query heads, any layer's keys). The
# plan takes q[S, Hq, Dh] and a layer's keys and values [B, P, Hkv, Dh].
PagedDecode = Callable[[Pages, int, Tensor], AttentionPlan]
# Makes the plan for several new tokens of each, from (pages, query_start[S+1], any layer's keys); it takes
# q[T, Hq, Dh] (Part 13).
PagedPrefill = Callable[[Pages, tuple[int, ...], Tensor], AttentionPlan]


def paged_decode(pages: Pages, num_heads: int, keys: Tensor) -> AttentionPlan:
    """The fastest plan for this memory: it reads pages where they lie if this machine has one that can.

    `keys`: any layer's, [B, P, Hkv, Dh].
    """
    if not supports_ragged(keys):
        return Gathered(pages, num_heads, keys)
    if page_reader.is_available():
        return page_reader.PageReader(pages.tables, pages.lens)
    return ragged(pages, num_heads, keys)


def ragged(pages: Pages, num_heads: int, keys: Tensor) -> Ragged:
    """Part 6's product over keys[B, P, Hkv, Dh], where a token's heads are neighbours: the next head's row
    is 1 further.
    """
    Hkv = keys.shape[2]
    return Ragged(pages.all_places() * Hkv, pages.lens, num_heads, Hkv, 1, keys)


# New k and v[T, Hkv, Dh] into a layer's keys and values[B, P, Hkv, Dh], at slots[T] = block · P + offset in
# the block.
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def store_by_index(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """The `Store` that needs nothing but PyTorch."""
    for memory, x in ((keys, k), (values, v)):
        memory.flatten(0, 1).index_copy_(0, slots, x)  # [B·P, Hkv, Dh], a view


def gather(memory: Tensor, places: Tensor) -> Tensor:
    """memory[B, P, Hkv, Dh], places[K] -> [K, Hkv, Dh]: the tokens that lie there, copied together."""
    return memory.flatten(0, 1).index_select(0, places)


class Gathered:
    """Copies each sequence's keys and values into a row of a matrix, then softmax(q·kᵀ / √Dh)·v of all rows.

    The row of a shorter sequence is filled up with copies of the sequence's first token, which are masked.
    What lies elsewhere would not do, since it may be NaN, and a mask does not hide NaN.
    """

    def __init__(self, pages: Pages, num_heads: int, keys: Tensor) -> None:
        """keys[B, P, Hkv, Dh]: any layer's, for their device."""
        S, longest = len(pages.lens), int(pages.lens.max())
        column = np.broadcast_to(np.arange(longest), (S, longest))  # [S, longest]
        is_padding = column >= pages.lens[:, None]  # [S, longest]
        sequence = np.arange(S)[:, None]
        places = pages.places(sequence, np.where(is_padding, 0, column))  # [S, longest]
        self.places, hidden = on_device(keys.device, places.ravel(), is_padding.ravel())  # [S · longest] each
        mask = torch.zeros(S, longest, dtype=torch.float32, device=keys.device)
        mask = mask.masked_fill_(hidden.view(S, longest).bool(), -torch.inf)
        self.mask = mask[:, None, None]  # [S, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [S, Hq, Dh]"""
        (S, Hq, Dh), Hkv = q.shape, keys.shape[2]
        # [S, Hkv, longest, Dh] each
        k, v = (gather(x, self.places).view(S, -1, Hkv, Dh).transpose(1, 2) for x in (keys, values))
        queries = (q * Dh**-0.5).view(S, Hkv, Hq // Hkv, Dh)  # the query heads that share a key head
        scores = queries @ k.transpose(2, 3) + self.mask  # [S, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(S, Hq, Dh)
