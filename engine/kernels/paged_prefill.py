"""`flash_prefill.py` over pages: several new tokens of each sequence attend to all tokens of the sequence.
Part 13.

Promises the results of the varlen kernel over gathered keys and values, but reads keys and values in their
pages. So a chunk of a prompt sees the earlier chunks, and a prompt sees its beginning in the prefix cache.
The new tokens' keys and values must be stored before the call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.paged import Pages
from engine.attention.varlen import max_length
from engine.kernels.flash_prefill import MAX_HEAD_DIM, MIN_DOT_SIZE, TILES
from engine.kernels.running_softmax import add_tile
from engine.machine.device import on_device


class PagedPrefill:
    """The plan of one step's attention over pages, which all layers use."""

    def __init__(self, pages: Pages, query_start: tuple[int, ...], keys: Tensor) -> None:
        """query_start[S+1]: sequence s has the queries query_start[s]:query_start[s+1]. `keys`: any layer's
        keys [B, P, Hkv, Dh]. Raises ValueError for heads wider than MAX_HEAD_DIM.
        """
        if keys.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim={keys.shape[-1]}: this kernel accepts up to {MAX_HEAD_DIM}")
        self.tables, self.lens = pages.on(keys.device)  # [S, W], [S]
        (self.query_start,) = on_device(keys.device, query_start, dtype=torch.int32)
        self.max_queries = max_length(query_start)  # of one sequence

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[T, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [T, Hq, Dh]."""
        (T, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(T, Hq, Dh, dtype=q.dtype, device=q.device)
        tile = TILES[q.element_size()]
        _paged_prefill[(triton.cdiv(self.max_queries, tile), Hq, len(self.lens))](
            q, keys, values, out, self.query_start, self.tables, self.lens, self.tables.stride(0),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), Dh**-0.5,
            GROUP=Hq // Hkv, HKV=Hkv, DH=Dh, DH_PADDED=max(MIN_DOT_SIZE, triton.next_power_of_2(Dh)), P=P,
            ROWS=tile, COLS=tile, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out


@triton.jit
def _paged_prefill(
    q, keys, values, out, query_start, tables, lens, width, q_token, q_head, out_token, out_head, scale,
    GROUP: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (tile of ROWS queries, query head, sequence): the tile's rows of out[T, HQ, DH].

    `width` is W of tables[S, W]. q_token, q_head, out_token and out_head are strides, in numbers.
    """
    # 1. This program's tile of queries, head and sequence.
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    Tq, Tk = tl.load(query_start + sequence + 1) - start, tl.load(lens + sequence)
    first = tl.program_id(0) * ROWS
    if first >= Tq:  # the grid has as many tiles as the sequence with the most queries needs
        return
    past = Tk - Tq
    row = first + tl.arange(0, ROWS)  # [ROWS]
    col = tl.arange(0, COLS)  # [COLS]
    dim = tl.arange(0, DH_PADDED)  # [DH_PADDED]
    inside = (row < Tq)[:, None] & (dim < DH)[None, :]  # [ROWS, DH_PADDED]
    token = (start + row).to(tl.int64)[:, None]  # [ROWS, 1]
    queries = tl.load(q + token * q_token + head * q_head + dim[None, :], mask=inside, other=0.0)
    # 2. The running softmax over tiles of COLS keys, up to the last key that a query of the tile sees. The
    #    block table says where the keys lie.
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DH_PADDED], tl.float32)
    for key_start in range(0, past + tl.minimum(first + ROWS, Tq), COLS):
        position = key_start + col  # [COLS]
        valid = position < Tk
        block = tl.load(tables + sequence * width + position // P, mask=valid, other=0).to(tl.int64)  # [COLS]
        kv_row = (block * P + position % P) * HKV + head // GROUP  # [COLS]: the row of keys.view(-1, DH)
        offsets = kv_row[:, None] * DH + dim[None, :]  # [COLS, DH_PADDED]
        in_bounds = valid[:, None] & (dim < DH)[None, :]
        k = tl.load(keys + offsets, mask=in_bounds, other=0.0)  # [COLS, DH_PADDED]
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [ROWS, COLS]
        scores = tl.where(position[None, :] <= (past + row)[:, None], scores, -float("inf"))
        v = tl.load(values + offsets, mask=in_bounds, other=0.0)
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
    # 3. The mean of the values, weighted by the softmax.
    out += token * out_token + head * out_head + dim[None, :]
    tl.store(out, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
