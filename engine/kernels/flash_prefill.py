"""`tiled.py` as a GPU kernel in Triton, with one program for each tile of queries, head and sequence. Part 9.

Promises the results of `dense.py` up to rounding, for packed sequences, grouped heads and heads up to 128
wide. Products of fp32 numbers are computed in fp32, not in TF32. The kernel uses only pointers and masks, so
the kernel runs on any GPU that Triton supports, and with TRITON_INTERPRET=1 on a CPU, slowly.
`flash_prefill_tma.py` is tuned for Hopper. Needs the package triton. Source: Dao 2023,
https://arxiv.org/abs/2307.08691.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.interface import Spans
from engine.attention.varlen import max_length

MAX_HEAD_DIM = 128
MIN_DOT_SIZE = 16  # the fewest rows, columns and terms of a matrix product on tensor cores
TILES = {2: 64, 4: 32}  # bytes of a number -> the number of queries and of keys in a tile


def flash_prefill(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The varlen kernel of `interface.py`: q[T, Hq, Dh], k and v[K, Hkv, Dh] -> out[T, Hq, Dh].

    Raises ValueError for heads wider than MAX_HEAD_DIM.
    """
    (T, Hq, Dh), (_, Hkv, _) = q.shape, k.shape
    if Dh > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={Dh}: this kernel accepts up to {MAX_HEAD_DIM}")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(T, Hq, Dh, dtype=q.dtype, device=q.device)
    tile = TILES[q.element_size()]
    query_start, key_start = spans.on(q.device)
    grid = triton.cdiv(max_length(spans.query_start), tile), Hq, len(spans.query_start) - 1
    _flash_prefill[grid](
        q, k, v, out, query_start, key_start, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), out.stride(0), out.stride(1), Dh**-0.5,
        GROUP=Hq // Hkv, DH=Dh, DH_PADDED=max(MIN_DOT_SIZE, triton.next_power_of_2(Dh)), ROWS=tile, COLS=tile,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _flash_prefill(
    q, k, v, out, query_start, key_start,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,  # strides
    scale,
    GROUP: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (tile of ROWS queries, query head, sequence): out[T, Hq, Dh]."""
    # 1. This program's tile of queries, head and sequence.
    head, sequence = tl.program_id(1), tl.program_id(2)
    q_start, k_start = tl.load(query_start + sequence), tl.load(key_start + sequence)
    Tq, Tk = tl.load(query_start + sequence + 1) - q_start, tl.load(key_start + sequence + 1) - k_start
    first = tl.program_id(0) * ROWS
    if first >= Tq:  # the grid has as many tiles as the sequence with the most queries needs
        return
    past = Tk - Tq

    # 2. The tile of queries. Numbers beyond the sequence's end or the head's width are loaded as 0.
    row = first + tl.arange(0, ROWS)  # [ROWS]
    col = tl.arange(0, COLS)  # [COLS]
    dim = tl.arange(0, DH_PADDED)  # [DH_PADDED]
    q += (q_start + row).to(tl.int64)[:, None] * q_token + head * q_head + dim[None, :]
    out += (q_start + row).to(tl.int64)[:, None] * out_token + head * out_head + dim[None, :]
    k += (k_start + col).to(tl.int64)[None, :] * k_token + head // GROUP * k_head + dim[:, None]
    v += (k_start + col).to(tl.int64)[:, None] * v_token + head // GROUP * v_head + dim[None, :]
    inside = (row < Tq)[:, None] & (dim < DH)[None, :]
    queries = tl.load(q, mask=inside, other=0.0)  # [ROWS, DH_PADDED]

    # 3. The running softmax, as in `RunningSoftmax`.
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DH_PADDED], tl.float32)
    for start in range(0, past + tl.minimum(first + ROWS, Tq), COLS):
        # a. Scores of a tile of keys, in fp32. A query does not see later keys, nor keys beyond the end.
        valid = start + col < Tk
        step = tl.cast(start, tl.int64)
        keys = tl.load(
            k + step * k_token, mask=valid[None, :] & (dim < DH)[:, None], other=0.0
        )  # [DH_PADDED, COLS]
        scores = tl.dot(queries, keys, input_precision="ieee") * scale  # [ROWS, COLS]
        scores = tl.where((start + col)[None, :] <= (past + row)[:, None], scores, -float("inf"))
        # b. The new maximum, and the factor `shrink` that makes the sums so far relative to the new maximum.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))  # [ROWS]
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])  # [ROWS, COLS]
        # c. Shrink the sums, and add the tile.
        values = tl.load(
            v + step * v_token, mask=valid[:, None] & (dim < DH)[None, :], other=0.0
        )  # [COLS, DH_PADDED]
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        maximum = new_maximum

    # 4. The mean of the values, weighted by the softmax.
    tl.store(out, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
