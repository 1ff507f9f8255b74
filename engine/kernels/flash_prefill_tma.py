"""`flash_prefill.py` tuned for Hopper. Part 9.

`benchmarks/part09_prefill_gpu.py` measures each of the four changes:

1. The tensor memory accelerator (TMA) fetches tiles. The accelerator needs a descriptor of the whole tensor
   and a tile's coordinates, and not an address for each number.
2. The loop over keys is split in two. Only the tiles on the diagonal have keys that a query must not see, so
   only the second loop masks scores.
3. The softmax uses exp2 in place of exp. The factor log2(e) is part of the scale.
4. The last tiles of a sequence take the longest, so these tiles begin first. Neighbouring programs have
   neighbouring heads, so heads that share keys run at the same time.

Promises the results of `flash_prefill.py`, and calls `flash_prefill.py` for tensors that are not
`describable`: fp32 gains nothing from TMA, and a descriptor needs a start and strides that are multiples of
16 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.attention.interface import Spans
from engine.attention.varlen import max_length
from engine.kernels.flash_prefill import MAX_HEAD_DIM, MIN_DOT_SIZE, flash_prefill

TILE = 64  # the number of queries and of keys in a tile
LOG2_E = 1.4426950408889634  # exp(x) = 2 ** (x · log2 e)


def describable(x: Tensor) -> bool:
    """Whether the accelerator can fetch tiles of x[T, H, Dh]: numbers have 16 bits, a head's numbers lie side
    by side, and the start and the strides are multiples of 16 bytes.
    """
    token_bytes, head_bytes = (stride * x.element_size() for stride in x.stride()[:2])
    aligned = all(number % 16 == 0 for number in (x.data_ptr(), token_bytes, head_bytes))
    return x.element_size() == 2 and x.stride(2) == 1 and aligned


def flash_prefill_tma(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The varlen kernel of `interface.py`: q[T, Hq, Dh], k and v[K, Hkv, Dh] -> out[T, Hq, Dh].

    `flash_prefill` computes what the accelerator cannot fetch. It raises ValueError for heads wider than
    MAX_HEAD_DIM.
    """
    (T, Hq, Dh), (_, Hkv, _) = q.shape, k.shape
    if Dh > MAX_HEAD_DIM or not all(map(describable, (q, k, v))):
        return flash_prefill(q, k, v, spans)
    out = torch.empty(T, Hq, Dh, dtype=q.dtype, device=q.device)
    padded = max(MIN_DOT_SIZE, triton.next_power_of_2(Dh))
    query_start, key_start = spans.on(q.device)
    grid = Hq, triton.cdiv(max_length(spans.query_start), TILE), len(spans.query_start) - 1
    _flash_prefill_tma[grid](
        _descriptor(q, padded), _descriptor(k, padded), _descriptor(v, padded), out, query_start, key_start,
        out.stride(0), Dh**-0.5 * LOG2_E,
        GROUP=Hq // Hkv, DH=Dh, DH_PADDED=padded, TILE=TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _descriptor(x: Tensor, padded: int) -> TensorDescriptor:
    """The descriptor of x[T, H, Dh] with tiles of one head, TILE tokens and `padded` numbers of the head.
    Numbers outside x are loaded as 0.
    """
    (T, H, Dh), (token, head, _) = x.shape, x.stride()
    return TensorDescriptor(x, [H, T, Dh], [head, token, 1], [1, TILE, padded])


@triton.jit
def _flash_prefill_tma(
    q, k, v, out, query_start, key_start, out_token, scale,
    GROUP: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (query head, tile of TILE queries, sequence): the tile's rows of out[T, Hq, Dh]."""
    # 1. This program's head, sequence and tile of queries. Tiles are counted from the end of the longest
    #    sequence, so the first programs of a shorter sequence have no queries.
    head, sequence = tl.program_id(0), tl.program_id(2)
    q_start, k_start = tl.load(query_start + sequence), tl.load(key_start + sequence)
    Tq, Tk = tl.load(query_start + sequence + 1) - q_start, tl.load(key_start + sequence + 1) - k_start
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE
    if first >= Tq:
        return
    past = Tk - Tq

    # 2. The tile of queries. Rows beyond the sequence's end may belong to the next sequence. The results of
    #    these rows are not stored.
    row = first + tl.arange(0, TILE)  # [TILE]
    col = tl.arange(0, TILE)  # [TILE]
    queries = q.load([head, q_start + first, 0]).reshape(TILE, DH_PADDED)
    kv_head = head // GROUP
    maximum = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE, DH_PADDED], tl.float32)

    # 3. Tiles of keys that all queries of the tile see: scores need no mask.
    diagonal = (past + first) // TILE * TILE  # the first tile that may have a key later than the first query
    for start in range(0, diagonal, TILE):
        keys = k.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)
        scores = tl.dot(queries, keys.T)  # [TILE, TILE]
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        weighted = weighted * shrink[:, None]
        values = v.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)
        weighted = tl.dot(weights.to(values.dtype), values, weighted)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum

    # 4. The tiles on the diagonal. Values beyond the sequence's end may belong to the next sequence, and may
    #    be NaN. These values are set to 0, since a weight of 0 times NaN would be NaN.
    for start in range(diagonal, past + tl.minimum(first + TILE, Tq), TILE):
        keys = k.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)
        scores = tl.dot(queries, keys.T)  # [TILE, TILE]
        scores = tl.where((start + col)[None, :] <= (past + row)[:, None], scores * scale, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        weighted = weighted * shrink[:, None]
        values = v.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)
        values = tl.where((start + col < Tk)[:, None], values, 0.0)
        weighted = tl.dot(weights.to(values.dtype), values, weighted)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum

    # 5. The mean of the values, weighted by the softmax.
    dim = tl.arange(0, DH_PADDED)
    out += (q_start + row).to(tl.int64)[:, None] * out_token + head * DH + dim[None, :]
    inside = (row < Tq)[:, None] & (dim < DH)[None, :]
    tl.store(out, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
