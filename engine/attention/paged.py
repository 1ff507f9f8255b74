"""Attention over keys and values that lie in pages: blocks of P tokens, anywhere in one large memory.

`Pages` says where the tokens of each sequence lie. A step makes one attention plan from its `Pages` and calls
the plan with `(q, keys, values)` in each layer. There are three plans:

- `PageReader` reads the pages in place, in C. It needs fp32 on a CPU, and a compiler.
- `Ragged` (Part 7) reads the pages in place, in PyTorch. It needs fp32 on a CPU.
- `Gathered` copies the keys and values of each sequence into one piece first. It needs only PyTorch. The
  other plans must give its results.

This module is Part 12's. A kernel that reads pages on a GPU comes in Part 13.
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
    """Where the tokens of S sequences lie. A step makes one `Pages` for all layers."""

    tables: np.ndarray  # [S, W]: the blocks of each sequence, in order; later entries are not read
    lens: np.ndarray  # [S]: the number of tokens of each sequence
    block_size: int  # P
    _by_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    @staticmethod
    def of(tables: Sequence[np.ndarray], lens: Sequence[int], block_size: int) -> "Pages":
        """Pages from the blocks and the number of tokens of each of S sequences.

        `tables[s]` has the blocks of sequence s, at least as many as its lens[s] tokens need.
        """
        num_blocks = [-(-length // block_size) for length in lens]  # [S]: rounded up
        padded = np.zeros((len(tables), max(num_blocks)), dtype=np.int64)  # [S, W]
        for row, table, n in zip(padded, tables, num_blocks, strict=True):
            row[:n] = table[:n]
        return Pages(padded, np.array(lens), block_size)

    def select(self, sequences: np.ndarray) -> "Pages":
        """The pages of some sequences. `sequences` is a boolean mask[S] or an array of indices."""
        return Pages(self.tables[sequences], self.lens[sequences], self.block_size)

    def places(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """[N]: where token position[n] of sequence sequence[n] lies: its block · P + its offset there."""
        P = self.block_size
        return self.tables[sequence, position // P] * P + position % P

    def all_places(self) -> np.ndarray:
        """[sum of lens]: where every token lies, as `places` says, sequence by sequence."""
        sequence = np.repeat(np.arange(len(self.lens)), self.lens)  # [sum of lens]: each token's sequence
        first_token = np.cumsum(self.lens) - self.lens  # [S]: the index of each sequence's first token
        position = np.arange(len(sequence)) - np.repeat(first_token, self.lens)  # [sum of lens]
        return self.places(sequence, position)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """tables[S, W] and lens[S] as int32 tensors on `device`. Only the first call copies them."""
        if device not in self._by_device:
            flat_tables, lens = on_device(device, self.tables.ravel(), self.lens, dtype=torch.int32)
            self._by_device[device] = flat_tables.view(self.tables.shape), lens
        return self._by_device[device]


# plan = make(pages, Hq, keys): the plan of a step with one new token for each of S sequences. `keys` are the
# keys of any layer. The plan is called with q[S, Hq, Dh] and a layer's keys and values [B, P, Hkv, Dh].
MakeDecodePlan = Callable[[Pages, int, Tensor], AttentionPlan]
# plan = make(pages, query_start[S+1], keys): the plan of a step with several new tokens for each sequence.
# The plan is called with q[T, Hq, Dh] and a layer's keys and values (Part 13).
MakePrefillPlan = Callable[[Pages, tuple[int, ...], Tensor], AttentionPlan]


def paged_decode(pages: Pages, num_heads: int, keys: Tensor) -> AttentionPlan:
    """The fastest plan of this module for one new token of each sequence of `pages`.

    `num_heads` is Hq. `keys` are the keys of any layer, [B, P, Hkv, Dh]. Their device and dtype decide, and
    whether there is a compiler for `PageReader`.
    """
    if not supports_ragged(keys):
        return Gathered(pages, num_heads, keys)
    if page_reader.is_available():
        return page_reader.PageReader(pages.tables, pages.lens)
    return ragged(pages, num_heads, keys)


def ragged(pages: Pages, num_heads: int, keys: Tensor) -> Ragged:
    """Part 7's `Ragged` plan over pages.

    `num_heads` is Hq. `keys` are the keys of any layer, [B, P, Hkv, Dh].
    """
    Hkv = keys.shape[2]
    # Seen as rows of Dh numbers, the keys of a token's heads are neighbours, so the head stride is 1.
    return Ragged(pages.all_places() * Hkv, pages.lens, num_heads, Hkv, head_stride=1, keys=keys)


# store(k, v, keys, values, slots) writes the new k and v [T, Hkv, Dh] into a layer's keys and values
# [B, P, Hkv, Dh]. Token t goes to slots[t] = block · P + offset in the block: its place, as `Pages.places`
# computes it.
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def store_by_index(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """The `Store` that needs only PyTorch.

    k and v [T, Hkv, Dh], keys and values [B, P, Hkv, Dh], slots[T].
    """
    keys.flatten(0, 1).index_copy_(0, slots, k)  # keys.flatten(0, 1) is a view [B·P, Hkv, Dh]
    values.flatten(0, 1).index_copy_(0, slots, v)


def gather(memory: Tensor, places: Tensor) -> Tensor:
    """memory[B, P, Hkv, Dh], places[K] -> [K, Hkv, Dh]: copies of the tokens at these places
    (`Pages.places`).
    """
    return memory.flatten(0, 1).index_select(0, places)


class Gathered:
    """The `AttentionPlan` that copies the keys and values of each sequence into one row of a matrix, and then
    computes softmax(q·kᵀ / √Dh)·v for all rows at once.

    A row is padded to the longest sequence with copies of its sequence's first token, which a mask hides.
    Unused memory would not do as padding: it may hold NaN, and a mask does not hide NaN.
    """

    def __init__(self, pages: Pages, num_heads: int, keys: Tensor) -> None:
        """keys[B, P, Hkv, Dh] are the keys of any layer: only their device matters. `num_heads` is not used:
        `MakeDecodePlan` has it, since other plans need it.
        """
        S, longest = len(pages.lens), int(pages.lens.max())
        column = np.broadcast_to(np.arange(longest), (S, longest))  # [S, longest]
        is_padding = column >= pages.lens[:, None]  # [S, longest]
        sequence = np.arange(S)[:, None]  # [S, 1]
        position = np.where(is_padding, 0, column)  # [S, longest]
        places = pages.places(sequence, position)  # [S, longest]
        self.places, hidden = on_device(keys.device, places.ravel(), is_padding.ravel())  # [S · longest] each
        mask = torch.zeros(S, longest, dtype=torch.float32, device=keys.device)
        # `on_device` has made integers of the bools.
        mask = mask.masked_fill_(hidden.view(S, longest).bool(), -torch.inf)
        self.mask = mask[:, None, None]  # [S, 1, 1, longest]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [S, Hq, Dh]"""
        S, Hq, Dh = q.shape
        Hkv = keys.shape[2]
        k = gather(keys, self.places).view(S, -1, Hkv, Dh).transpose(1, 2)  # [S, Hkv, longest, Dh]
        v = gather(values, self.places).view(S, -1, Hkv, Dh).transpose(1, 2)  # [S, Hkv, longest, Dh]
        queries = (q * Dh**-0.5).view(S, Hkv, Hq // Hkv, Dh)  # grouped by the key head that they share
        scores = queries @ k.transpose(2, 3) + self.mask  # [S, Hkv, Hq/Hkv, longest]
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).view(S, Hq, Dh)
