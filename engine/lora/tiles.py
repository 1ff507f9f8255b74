"""Which rows of a step have which adapter, and the product that adds an adapter's difference, in Triton. Part
18.

CUDA graphs can capture the kernels, since `tile_rows` and `tile_slots` keep their addresses, and so does
`middle` once the layer with the largest K has run. `DecodeGraphs` runs all layers before it captures.

The rows of a slot are put into tiles of TILE rows. All rows of a tile have the same slot, so a tile is one
product on tensor cores, which reads the slot's matrices once. The number of tiles with work changes from step
to step, but the grid of a CUDA graph does not change. So a tile may have NO_ADAPTER, and its program ends at
once.

There are two kernels: `_shrink` computes middle = x · down, K numbers a row (K: the rank of all parts of the
layer), and `_expand` adds middle · up to y. With TRITON_INTERPRET=1 both kernels run on a CPU, slowly. Source
of the idea: Chen et al. 2023, Punica, https://arxiv.org/abs/2310.18547.
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

TILE = 16  # rows of a tile: a matrix product on tensor cores has at least 16 rows
INNER = 64  # numbers of each row of x that a program of `_shrink` reads at a time
COLS = 64  # columns of y that a program of `_expand` computes
PADDING = -1  # stands in place of a row's index where a tile is not full


class TiledRows:
    """The rows of one step in two buffers. tile_rows[tiles, TILE] has the indices of each tile's rows, or
    PADDING. tile_slots[tiles] has each tile's slot, or NO_ADAPTER.
    """

    def __init__(self, max_tokens: int, max_loras: int, device: torch.device) -> None:
        """Make buffers for steps of up to `max_tokens` rows and any mixture of up to `max_loras` adapters."""
        self.max_loras = max_loras
        tiles = self._max_tiles(max_tokens)
        self.tile_rows = torch.full((tiles, TILE), PADDING, device=device, dtype=torch.int32)
        self.tile_slots = torch.full((tiles,), NO_ADAPTER, device=device, dtype=torch.int32)
        self.middle: Tensor | None = None  # [tiles * TILE, K] in fp32: the result of `_shrink`

    def _max_tiles(self, num_rows: int) -> int:
        """The largest number of tiles that `num_rows` rows can need. The last tile of each adapter may not be
        full, so each adapter may need one tile more. But no tile is empty, so there are `num_rows` at most.
        """
        return min(num_rows, triton.cdiv(num_rows, TILE) + self.max_loras)

    def fill(self, slots: Sequence[int], query_start: Sequence[int]) -> None:
        """As `AdapterRows.fill`: slots[S], query_start[S+1].

        A CUDA graph computes as many tiles as the graph was captured with, and this step may have fewer. So
        all tiles that this step does not need are set to NO_ADAPTER.
        """
        tile_rows, tile_slots = tiles_of(slots, query_start)
        self.tile_slots.fill_(NO_ADAPTER)
        if tile_slots:
            device, flat_rows = self.tile_rows.device, list(chain.from_iterable(tile_rows))
            new_rows, new_slots = on_device(device, flat_rows, tile_slots, dtype=torch.int32)
            self.tile_rows.view(-1)[: len(new_rows)] = new_rows
            self.tile_slots[: len(new_slots)] = new_slots

    def add(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """As `AdapterRows.add`, in place. y, down and up must be contiguous: kernels compute addresses."""
        assert y.is_contiguous(), "the kernels read y row by row"
        _, in_features, K = down.shape
        out_features = up.shape[2]
        tiles = self._max_tiles(len(x))
        if self.middle is None or self.middle.shape[1] < K:  # one buffer serves all layers in turn
            self.middle = torch.empty(len(self.tile_rows) * TILE, K, device=x.device)
        middle = self.middle
        sizes = {"K": K, "K_PADDED": max(16, triton.next_power_of_2(K)), "TILE": TILE}
        _shrink[(tiles,)](
            x.contiguous(), down, middle, self.tile_rows, self.tile_slots, middle.stride(0),
            IN=in_features, INNER=INNER, **sizes,
        )  # fmt: skip
        _expand[(tiles, triton.cdiv(out_features, COLS))](
            y, up, middle, self.tile_rows, self.tile_slots, middle.stride(0),
            OUT=out_features, COLS=COLS, **sizes,
        )  # fmt: skip
        return y


def tiles_of(slots: Sequence[int], query_start: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """slots[S], query_start[S+1] -> (tile_rows[tiles][TILE], tile_slots[tiles]): the rows of each slot in
    tiles of TILE rows. The last tile of a slot is filled up with PADDING.
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
    """Program (tile): middle[the tile's rows, K] = x[the tile's rows, IN] · down[slot][IN, K], in fp32.

    `stride` is the number of columns of `middle`, which has TILE rows for each tile.
    """
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:  # NO_ADAPTER
        return
    tile_row, column = tl.arange(0, TILE), tl.arange(0, K_PADDED)
    row = tl.load(tile_rows + tile * TILE + tile_row).to(tl.int64)  # [TILE]
    total = tl.zeros([TILE, K_PADDED], tl.float32)
    for start in range(0, IN, INNER):
        inner = start + tl.arange(0, INNER)
        x_tile = tl.load(
            x + row[:, None] * IN + inner[None, :],
            mask=(row >= 0)[:, None] & (inner < IN)[None, :],
            other=0.0,
        )  # [TILE, INNER]
        down_tile = tl.load(
            down + (slot * IN + inner[:, None]) * K + column[None, :],
            mask=(inner < IN)[:, None] & (column < K)[None, :],
            other=0.0,
        )  # [INNER, K_PADDED]
        total = tl.dot(x_tile, down_tile, total, input_precision="ieee")
    address = middle + (tile * TILE + tile_row)[:, None] * stride + column[None, :]
    tl.store(address, total, mask=(column < K)[None, :])


@triton.jit
def _expand(
    y, up, middle, tile_rows, tile_slots, stride,
    OUT: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): y[the tile's rows, COLS] += middle[the tile's rows, K] · up[slot][K, COLS].

    `stride` is the number of columns of `middle`. A row is in one tile only, so no two programs add to the
    same number of y.
    """
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:  # NO_ADAPTER
        return
    tile_row, inner = tl.arange(0, TILE), tl.arange(0, K_PADDED)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row = tl.load(tile_rows + tile * TILE + tile_row).to(tl.int64)  # [TILE]
    middle_tile = tl.load(
        middle + (tile * TILE + tile_row)[:, None] * stride + inner[None, :],
        mask=(inner < K)[None, :],
        other=0.0,
    )  # [TILE, K_PADDED]
    up_tile = tl.load(
        up + (slot * K + inner[:, None]) * OUT + col[None, :],
        mask=(inner < K)[:, None] & (col < OUT)[None, :],
        other=0.0,
    )  # [K_PADDED, COLS]
    inside = (row >= 0)[:, None] & (col < OUT)[None, :]
    pointers = y + row[:, None] * OUT + col[None, :]  # [TILE, COLS]
    total = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    total = tl.dot(middle_tile.to(up_tile.dtype), up_tile, total, input_precision="ieee")
    tl.store(pointers, total.to(y.dtype.element_ty), mask=inside)
