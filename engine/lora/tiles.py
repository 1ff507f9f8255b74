"""Rows by adapter over fixed buffers, for a GPU and its graphs: a grouped product in Triton. Part 18.

Rows of one adapter are put into tiles of TILE rows. A tile has one adapter, so it can use tensor cores, and
reads that adapter's matrices once. The number of tiles with work changes from step to step, but a graph's
grid does not: the program of a tile of NO_ADAPTER ends at once. Two kernels: `_shrink` computes middle = x ·
down, K numbers a row, and `_expand` adds middle · up to y. With TRITON_INTERPRET=1 they run on a CPU, slowly.
Source of the idea: Chen et al. 2023, Punica, https://arxiv.org/abs/2310.18547.
"""

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.lora.rows import ranges_of
from engine.machine.device import on_device
from engine.requests.batch import NO_ADAPTER

TILE = 16  # rows: the smallest matrix product on tensor cores has so many
INNER = 64  # numbers of a row of x that a program reads at a time
COLS = 64  # columns of y that a program adds to
PADDING = -1  # instead of a row's index, in a tile that is not full


class TiledRows:
    """The rows of one step in two buffers. tile_rows[tiles, TILE]: each tile's rows, or PADDING.
    tile_slots[tiles]: its adapter's slot, or NO_ADAPTER.
    """

    def __init__(self, max_tokens: int, max_loras: int, device: torch.device) -> None:
        """Buffers for steps of up to `max_tokens` rows, whatever their mixture of adapters."""
        self.max_loras = max_loras
        tiles = self._max_tiles(max_tokens)
        self.tile_rows = torch.full((tiles, TILE), PADDING, device=device, dtype=torch.int32)
        self.tile_slots = torch.full((tiles,), NO_ADAPTER, device=device, dtype=torch.int32)
        self.middle: Tensor | None = None  # [tiles * TILE, K]: what passes between the kernels

    def _max_tiles(self, num_rows: int) -> int:
        """The most tiles that this many rows can take: the last tile of each adapter may not be full."""
        return min(num_rows, triton.cdiv(num_rows, TILE) + self.max_loras)

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """slots[S], query_start[S+1]. A graph computes as many tiles as it was captured with, which may be
        more than this step has: so tiles of the step before are set to NO_ADAPTER.
        """
        rows, tile_slots = tiles_of(slots, query_start)
        self.tile_slots.fill_(NO_ADAPTER)
        if tile_slots:
            device = self.tile_rows.device
            flat_rows, new_slots = on_device(device, list(chain(*rows)), tile_slots, dtype=torch.int32)
            self.tile_rows.view(-1)[: len(flat_rows)] = flat_rows
            self.tile_slots[: len(new_slots)] = new_slots

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """y[T, out] += x[T, in] · down[slot] · up[slot], each row by its slot, in place; gives y."""
        (_, in_features, K), out_features = down.shape, up.shape[2]
        tiles = self._max_tiles(len(x))
        if self.middle is None or self.middle.shape[1] < K:  # all layers, one after the other, share it
            self.middle = torch.empty(len(self.tile_rows) * TILE, K, device=x.device)
        middle = self.middle
        lookup = self.tile_rows, self.tile_slots, middle.stride(0)
        sizes = {"K": K, "K_PADDED": max(16, triton.next_power_of_2(K)), "TILE": TILE}
        _shrink[(tiles,)](x.contiguous(), down, middle, *lookup, IN=in_features, INNER=INNER, **sizes)
        grid = tiles, triton.cdiv(out_features, COLS)
        _expand[grid](y, up, middle, *lookup, OUT=out_features, COLS=COLS, **sizes)
        return y


def tiles_of(slots: Sequence[int], query_start: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """slots[S], query_start[S+1] -> (tile_rows[tiles][TILE], tile_slots[tiles]): the rows of each adapter in
    tiles, its last one padded.
    """
    tile_rows, tile_slots = [], []
    for slot, ranges in ranges_of(slots, query_start):
        rows = list(chain(*ranges))
        for first in range(0, len(rows), TILE):
            tile = rows[first : first + TILE]
            tile_rows.append(tile + [PADDING] * (TILE - len(tile)))
            tile_slots.append(slot)
    return tile_rows, tile_slots


@triton.jit
def _shrink(
    x, down, middle, tile_rows, tile_slots, stride,
    IN: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile): middle[tile's TILE rows, K] = x[its rows, IN] · down[its slot][IN, K], in fp32."""
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:
        return
    i, k = tl.arange(0, TILE), tl.arange(0, K_PADDED)
    row = tl.load(tile_rows + tile * TILE + i).to(tl.int64)  # [TILE]
    total = tl.zeros([TILE, K_PADDED], tl.float32)
    for start in range(0, IN, INNER):
        d = start + tl.arange(0, INNER)
        # a[TILE, INNER] · b[INNER, K_PADDED]
        a = tl.load(
            x + row[:, None] * IN + d[None, :], mask=(row >= 0)[:, None] & (d < IN)[None, :], other=0.0
        )
        b = tl.load(
            down + (slot * IN + d[:, None]) * K + k[None, :],
            mask=(d < IN)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(middle + (tile * TILE + i)[:, None] * stride + k[None, :], total, mask=(k < K)[None, :])


@triton.jit
def _expand(
    y, up, middle, tile_rows, tile_slots, stride,
    OUT: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): y[its rows, COLS] += middle[its TILE rows, K] · up[its slot][K, COLS]. A row
    is in one tile, so no other program adds to these numbers.
    """
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:
        return
    i, k = tl.arange(0, TILE), tl.arange(0, K_PADDED)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(tile_rows + tile * TILE + i).to(tl.int64)  # [TILE]
    # a[TILE, K_PADDED] · b[K_PADDED, COLS]
    a = tl.load(middle + (tile * TILE + i)[:, None] * stride + k[None, :], mask=(k < K)[None, :], other=0.0)
    b = tl.load(
        up + (slot * K + k[:, None]) * OUT + col[None, :],
        mask=(k < K)[:, None] & (col < OUT)[None, :],
        other=0.0,
    )
    inside = (row >= 0)[:, None] & (col < OUT)[None, :]
    pointers = y + row[:, None] * OUT + col[None, :]  # [TILE, COLS]
    total = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
    tl.store(pointers, total.to(y.dtype.element_ty), mask=inside)
