"""Which rows of a step belong to which adapter, and what it adds to them. LoRA's one side channel. Part 18.

A step's tokens go through the model together, and a linear layer sees T rows without names. So all wrapped
layers share one record of rows, which is filled before the forward pass. Here it is in plain PyTorch, for a
CPU; `engine/lora/tiles.py` has the same over fixed buffers, for a GPU and its graphs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

NOBODY = -1  # the slot of a row without an adapter
Group = tuple[int, slice | Tensor]  # a slot, and the rows of the step that are its


class Rows(Protocol):
    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """slots[S], query_start[S+1]: sequence s owns the rows query_start[s]:query_start[s+1]."""

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """y[T, out] += x[T, in] · down[slot] · up[slot], each row by its slot; gives y.

        down[slots, in, K], up[slots, K, out]. NOBODY's rows stay as they are.
        """


class GroupedRows:
    """By adapter: the rows of each are taken together, so that its matrices are read once a step."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        self.groups = groups_of(slots, query_start)

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return add_grouped(y, x, down, up, self.groups)


def ranges_of(slots: Sequence[int], query_start: Sequence[int]) -> list[tuple[int, list[range]]]:
    """By slot: the rows of its sequences, one range each."""
    ranges: dict[int, list[range]] = {}
    for s, slot in enumerate(slots):
        if slot != NOBODY:
            ranges.setdefault(slot, []).append(range(query_start[s], query_start[s + 1]))
    return sorted(ranges.items())


def groups_of(slots: Sequence[int], query_start: Sequence[int]) -> list[Group]:
    """The rows of each slot, by slot. Neighbours are a slice, which needs no copy of them."""
    groups: list[Group] = []
    for slot, own in ranges_of(slots, query_start):
        together = range(own[0].start, own[-1].stop)
        if len(together) == sum(map(len, own)):
            groups.append((slot, slice(together.start, together.stop)))
        else:
            groups.append((slot, torch.tensor([row for rows in own for row in rows])))
    return groups


def add_grouped(y: Tensor, x: Tensor, down: Tensor, up: Tensor, groups: Sequence[Group]) -> Tensor:
    """y[T, out] += x[T, in] · down[slot] · up[slot] for the rows of each group, in place; gives y.

    Two thin products, never the matrix down · up: that would be as large as the layer's own. Rows of no group
    are not touched.
    """
    for slot, rows in groups:
        middle = x[rows] @ down[slot]  # [n, K]
        if isinstance(rows, slice):
            y[rows].addmm_(middle, up[slot])
        else:
            y.index_add_(0, rows, middle @ up[slot])
    return y
