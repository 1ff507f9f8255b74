"""Attention with extras in Triton: windows, soft caps, sinks and scales, over keys and values in their pages.
Extension C.

Promises the results of `GatheredWithExtras` (engine/attention/extras_paged.py) up to rounding, for sequences
with one new token or many. With a window, a program loads no key before the first key that one of its queries
sees. A sequence is not split among programs as in Part 13, so one long sequence without a window leaves much
of a GPU idle. With TRITON_INTERPRET=1 the kernel runs on a CPU, slowly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.extras import AttentionExtras
from engine.attention.paged import Pages
from engine.attention.varlen import max_length
from engine.kernels.flash_prefill import MAX_HEAD_DIM, MIN_DOT_SIZE, TILES
from engine.kernels.running_softmax import add_tile
from engine.machine.device import on_device

# Below any score, in place of -inf: a row that sees no key of a tile would compute -inf - -inf, which is NaN.
LOWEST = tl.constexpr(-1e30)


class PagedExtras:
    """The `ExtrasPlan` of one step, in one kernel for each layer."""

    def __init__(self, pages: Pages, query_start: tuple[int, ...], keys: Tensor) -> None:
        """query_start[S+1]: sequence s has the queries query_start[s]:query_start[s+1]. `keys`: any layer's
        keys [B, P, Hkv, Dh]. Raises ValueError for heads wider than MAX_HEAD_DIM.
        """
        if keys.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim={keys.shape[-1]}: this kernel accepts up to {MAX_HEAD_DIM}")
        self.tables, self.lens = pages.on(keys.device)  # [S, W], [S]
        (self.query_start,) = on_device(keys.device, query_start, dtype=torch.int32)
        self.max_queries = max_length(query_start)  # of one sequence

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, extras: AttentionExtras) -> Tensor:
        """q[T, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [T, Hq, Dh]. `extras`: the layer's."""
        return extras_attention(
            q, keys, values, self.tables, self.lens, self.query_start, self.max_queries, extras
        )


def extras_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, query_start: Tensor,
    max_queries: int, extras: AttentionExtras,
) -> Tensor:  # fmt: skip
    """q[T, Hq, Dh], keys and values[B, P, Hkv, Dh], tables[S, W], lens[S], query_start[S+1] -> [T, Hq, Dh].

    Sequence s has lens[s] tokens. Its queries query_start[s]:query_start[s+1] are the last of them, at most
    `max_queries`. A sequence of length 0 is padding, and its result may be anything.
    """
    (T, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(T, Hq, Dh, dtype=q.dtype, device=q.device)
    group, tile = Hq // Hkv, TILES[q.element_size()]
    max_rows = max_queries * group  # of one sequence and one key head
    rows = max(MIN_DOT_SIZE, min(tile, triton.next_power_of_2(max_rows)))
    scale = Dh**-0.5 if extras.scale is None else extras.scale
    # In place of an extra that the layer does not have, the kernel gets some value that it does not read.
    sinks = q if extras.sinks is None else extras.sinks
    softcap = 1.0 if extras.softcap is None else extras.softcap
    window = 0 if extras.window is None else extras.window
    _attend_with_extras[(triton.cdiv(max_rows, rows), Hkv, len(lens))](
        q, keys, values, sinks, out, query_start, tables, lens, tables.stride(0),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale, softcap, window,
        HAS_SOFTCAP=extras.softcap is not None, HAS_WINDOW=extras.window is not None,
        HAS_SINKS=extras.sinks is not None, GROUP=group, HKV=Hkv, DH=Dh,
        DH_PADDED=max(MIN_DOT_SIZE, triton.next_power_of_2(Dh)), P=P, ROWS=rows, COLS=tile,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _attend_with_extras(
    q, keys, values, sinks, out, query_start, tables, lens, width, q_token, q_head, out_token, out_head,
    scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    HKV: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Program (tile of ROWS rows, key head, sequence): the tile's rows of out[T, HQ, DH]. A row is a query
    and one of the GROUP query heads that share the key head; the rows of a query are neighbours.

    `width` is W of tables[S, W]. q_token, q_head, out_token and out_head are strides, in numbers.
    """
    # 1. This program's rows: their queries and heads.
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    Tq, Tk = tl.load(query_start + sequence + 1) - start, tl.load(lens + sequence)
    first_row = tl.program_id(0) * ROWS
    if first_row >= Tq * GROUP or Tk == 0:  # the grid is as large as the longest sequence needs
        return
    past = Tk - Tq
    row = first_row + tl.arange(0, ROWS)  # [ROWS]
    position = past + row // GROUP  # [ROWS]: of the row's query
    head = kv_head * GROUP + row % GROUP  # [ROWS]
    col, dim = tl.arange(0, COLS), tl.arange(0, DH_PADDED)
    inside = (row < Tq * GROUP)[:, None] & (dim < DH)[None, :]  # [ROWS, DH_PADDED]
    token = (start + row // GROUP).to(tl.int64)
    queries = tl.load(q + (token * q_token + head * q_head)[:, None] + dim[None, :], mask=inside, other=0.0)
    # 2. If there is a sink, the running softmax begins with it: as a key with this score and a value of 0.
    weighted = tl.zeros([ROWS, DH_PADDED], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=row < Tq * GROUP, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        maximum = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    # 3. Tiles of COLS keys, from the first key that the first query sees to the position of the last query.
    #    Pages before the first key may belong to another sequence by now, and hold NaN.
    if HAS_WINDOW:
        first_key = tl.maximum(past + first_row // GROUP - window + 1, 0)
    else:
        first_key = 0
    end = past + tl.minimum((first_row + ROWS - 1) // GROUP + 1, Tq)
    for key_start in range(first_key // COLS * COLS, end, COLS):
        key = key_start + col  # [COLS]
        valid = (key >= first_key) & (key < end)
        block = tl.load(tables + sequence * width + key // P, mask=valid, other=0).to(tl.int64)  # [COLS]
        offsets = ((block * P + key % P) * HKV + kv_head)[:, None] * DH + dim[None, :]  # [COLS, DH_PADDED]
        in_bounds = valid[:, None] & (dim < DH)[None, :]
        k = tl.load(keys + offsets, mask=in_bounds, other=0.0)
        v = tl.load(values + offsets, mask=in_bounds, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [ROWS, COLS]
        if HAS_SOFTCAP:  # tanh(x) = 2 · sigmoid(2x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = valid[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
    # 4. The mean of the values. A row of padding may have seen no key, and must not be divided by 0.
    total = tl.where(total > 0, total, 1.0)
    address = out + (token * out_token + head * out_head)[:, None] + dim[None, :]
    tl.store(address, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
