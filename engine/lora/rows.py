"""Which rows of a step belong to which adapter, and the product that adds an adapter's difference. Part 18.

The tokens of all requests in a step go through the model together: a linear layer gets x[T, in] and does not
know which request a row belongs to. So all wrapped layers share one record of rows (vLLM calls this record
"LoRA mapping"). The engine fills the record before the forward pass.

This module has the record and the product in plain PyTorch, for a CPU. `engine/lora/tiles.py` has the same
over fixed buffers, for a GPU and its graphs. Both compute Punica's SGMV (segmented gather matrix-vector
multiplication). Source: Chen et al. 2023, https://arxiv.org/abs/2310.18547.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.requests.batch import NO_ADAPTER


class SlotRows(NamedTuple):
    """The rows of a step that have one slot."""

    slot: int
    rows: slice | Tensor  # a slice, or the rows' indices


class AdapterRows(Protocol):
    """The record of one step's rows and their slots. All wrapped layers of a model share one record."""

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """Record the rows of the step that comes next. slots[S], query_start[S+1]: sequence s has the rows
        query_start[s]:query_start[s+1] and the slot slots[s], or NO_ADAPTER.
        """

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """y[T, out] += x[T, in] · down[slot] · up[slot], where `slot` is the row's slot; returns y.

        down[max_loras, in, K], up[max_loras, K, out]; K is the largest rank times the number of parts that
        the layer fuses (`LoRALinear`). Rows with NO_ADAPTER stay as they are.
        """


class GroupedRows:
    """The record for a CPU. One product takes all rows of a slot, so a layer reads each slot once a step."""

    def __init__(self) -> None:
        self.groups: list[SlotRows] = []

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """As `AdapterRows.fill`: slots[S], query_start[S+1]."""
        self.groups = groups_of(slots, query_start)

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """As `AdapterRows.add`, in place."""
        return add_grouped(y, x, down, up, self.groups)


def ranges_of(slots: Sequence[int], query_start: Sequence[int]) -> list[tuple[int, list[range]]]:
    """slots[S], query_start[S+1] -> (slot, ranges) pairs in the order of slots, one range of rows for each
    sequence that has the slot. Sequences with NO_ADAPTER are left out.
    """
    ranges: dict[int, list[range]] = {}
    for s, slot in enumerate(slots):
        if slot != NO_ADAPTER:
            ranges.setdefault(slot, []).append(range(query_start[s], query_start[s + 1]))
    return sorted(ranges.items())


def groups_of(slots: Sequence[int], query_start: Sequence[int]) -> list[SlotRows]:
    """slots[S], query_start[S+1] -> each slot with all its rows, in the order of slots.

    Rows that lie side by side are given as a slice, since indexing with a slice does not copy x.
    """
    groups: list[SlotRows] = []
    for slot, ranges in ranges_of(slots, query_start):
        first, end = ranges[0].start, ranges[-1].stop
        num_rows = sum(len(rows) for rows in ranges)
        if num_rows == end - first:  # they lie side by side
            groups.append(SlotRows(slot, slice(first, end)))
        else:
            groups.append(SlotRows(slot, torch.tensor(list(chain(*ranges)))))
    return groups


def add_grouped(y: Tensor, x: Tensor, down: Tensor, up: Tensor, groups: Sequence[SlotRows]) -> Tensor:
    """y[T, out] += x[T, in] · down[slot] · up[slot] for the rows of each group, in place; returns y.

    down[max_loras, in, K], up[max_loras, K, out]. Two thin products are computed, and never the matrix
    down · up, which would be as large as the layer's weight. Rows that are in no group are not touched.
    """
    for slot, rows in groups:
        middle = x[rows] @ down[slot]  # [n, K]
        if isinstance(rows, slice):
            y[rows].addmm_(middle, up[slot])
        else:
            y.index_add_(0, rows, middle @ up[slot])
    return y
