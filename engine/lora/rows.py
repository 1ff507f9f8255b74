"""Which rows of a step belong to which adapter, and the product that adds its difference to them. Part 18.

A step's tokens go through the model together, and a linear layer sees T rows without their requests. So all
wrapped layers share one record of rows, vLLM's "LoRA mapping", which is filled before the forward pass. It is
all they know beside x. Here it is in plain PyTorch, for a CPU; `engine/lora/tiles.py` has the same over fixed
buffers, for a GPU and its graphs. What both compute is Punica's SGMV (segmented gather matrix-vector
multiplication): Chen et al. 2023, https://arxiv.org/abs/2310.18547.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from engine.requests.batch import NO_ADAPTER

Group = tuple[int, slice | Tensor]  # a slot, and the rows of the step that have its adapter


class Rows(Protocol):
    """The rows of one step, by their adapter's slot; the same for every layer."""

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """Before a step. slots[S], query_start[S+1]: sequence s has the rows
        query_start[s]:query_start[s+1], and the adapter in slots[s].
        """

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """y[T, out] += x[T, in] · down[slot] · up[slot], each row by its slot; gives y.

        down[slots, in, K], up[slots, K, out]. Rows of NO_ADAPTER stay as they are.
        """


class GroupedRows:
    """All rows of an adapter are multiplied in one product, so that its matrices are read once a step."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """slots[S], query_start[S+1]"""
        self.groups = groups_of(slots, query_start)

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """y[T, out] += x[T, in] · down[slot] · up[slot], each row by its slot, in place; gives y."""
        return add_grouped(y, x, down, up, self.groups)


def ranges_of(slots: Sequence[int], query_start: Sequence[int]) -> list[tuple[int, list[range]]]:
    """slots[S], query_start[S+1] -> each slot with the rows of its sequences, one range each, by slot."""
    ranges: dict[int, list[range]] = {}
    for s, slot in enumerate(slots):
        if slot != NO_ADAPTER:
            ranges.setdefault(slot, []).append(range(query_start[s], query_start[s + 1]))
    return sorted(ranges.items())


def groups_of(slots: Sequence[int], query_start: Sequence[int]) -> list[Group]:
    """slots[S], query_start[S+1] -> each slot with all its rows, by slot. Rows that are neighbours are a
    slice, which needs no copy of them.
    """
    groups: list[Group] = []
    for slot, ranges in ranges_of(slots, query_start):
        first, last = ranges[0].start, ranges[-1].stop
        if last - first == sum(map(len, ranges)):
            groups.append((slot, slice(first, last)))
        else:
            groups.append((slot, torch.tensor(list(chain(*ranges)))))
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
