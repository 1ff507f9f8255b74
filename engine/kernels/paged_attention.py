"""Decode attention in Triton: each of S sequences has one new token, and keys and values are read in their
pages. Part 13.

Promises the results of `Gathered` of `engine/attention/paged.py` up to rounding, without copying pages. A
program takes one key head of one sequence, with all query heads that share the key head. The program goes
over the sequence's tokens with a running softmax (Part 9).

One long sequence alone would keep one program per head busy, and leave the rest of the GPU idle. So a
sequence's tokens are split among several programs, and `_merge` joins the results (split-K). The grid depends
on the batch's shape and the device alone (`num_splits`). Each program finds out how far to read from `lens`
on the GPU, so a CUDA graph stays valid while sequences grow.

With TRITON_INTERPRET=1 the kernels run on a CPU, slowly. Source: Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.paged import Pages
from engine.kernels.flash_prefill import MIN_DOT_SIZE

TILE = 64  # tokens that a program reads at a time
MAX_SPLITS = 64  # the most programs among which a sequence is split, for each key head
MAX_HEAD_DIM = 256


class PagedAttention:
    """The `AttentionPlan` of one step, which all layers use: one new token of each of S sequences."""

    def __init__(self, pages: Pages, num_heads: int, keys: Tensor) -> None:
        """keys[B, P, Hkv, Dh]: any layer's keys. `num_heads` is not used: other plans need it. Raises
        ValueError for heads wider than MAX_HEAD_DIM.
        """
        if keys.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim={keys.shape[-1]}: this kernel accepts up to {MAX_HEAD_DIM}")
        self.tables, self.lens = pages.on(keys.device)  # [S, W], [S]
        self.splits = num_splits(len(pages.lens), keys.shape[2], keys.device)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [S, Hq, Dh]."""
        return paged_attention(q, keys, values, self.tables, self.lens, self.splits)


def num_splits(num_sequences: int, num_kv_heads: int, device: torch.device) -> int:
    """The number of programs among which each sequence is split, for each key head: a power of two from 1 to
    MAX_SPLITS. Every multiprocessor gets at least two programs, if MAX_SPLITS allows.

    The number depends only on the batch's shape and the device, since a captured graph cannot change its
    grid.
    """
    if device.type != "cuda":
        return 4  # any power of two will do: the interpreter runs programs one after the other
    num_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(num_programs, num_sequences * num_kv_heads)))


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, splits: int = 1
) -> Tensor:
    """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh], tables[S, W], lens[S] -> [S, Hq, Dh].

    Sequence s has lens[s] tokens. Token i lies in block tables[s, i // P] at place i % P. Two of the S may be
    one sequence at two lengths: each sees its own lens[s] tokens. Keys and values behind a sequence's end, or
    in blocks that are not the sequence's, are not read. A row of length 0 is padding, and its result may be
    anything. `splits` is a power of two.
    """
    (S, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
    q, out = q.contiguous(), torch.empty(S, Hq, Dh, dtype=q.dtype, device=q.device)
    shape = {"HQ": Hq, "DH": Dh, "DH_PADDED": max(MIN_DOT_SIZE, triton.next_power_of_2(Dh)), "SPLITS": splits}
    parts = out if splits == 1 else q.new_empty(S, Hq, splits, Dh, dtype=torch.float32)
    stats = q.new_empty(2, S, Hq, splits, dtype=torch.float32)
    maxima, totals = stats[0], stats[1]  # of each part
    _attend[(Hkv, S, splits)](
        q, keys, values, tables, lens, out, parts, maxima, totals, tables.stride(0), Dh**-0.5,
        HKV=Hkv, P=P, TOKENS=TILE, PADDED=max(MIN_DOT_SIZE, triton.next_power_of_2(Hq // Hkv)), **shape,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(Hq, S)](parts, maxima, totals, lens, out, TOKENS=TILE, **shape)
    return out


@triton.jit
def tokens_per_part(length, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """The number of tokens of a part: whole tiles, so the last parts of a short sequence may be empty."""
    return tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS


@triton.jit
def _attend(
    q, keys, values, tables, lens, out, parts, maxima, totals, width, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, P: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (key head, sequence, part): one part of a sequence's tokens, for one key head and the query
    heads that share the key head.

    tables[S, width]. PADDED and DH_PADDED are powers of two, at least 16. A part has `tokens_per_part`
    tokens. A part without tokens writes nothing: its program returns. A score is q·k · scale, and weighs
    e^(score - maximum). With SPLITS = 1 the mean goes to out[S, HQ, DH]. Otherwise each query head writes
    three results: its weighted sum to parts[S, HQ, SPLITS, DH], the maximum score, to which the sum is
    relative, to maxima[S, HQ, SPLITS], and the total weight to totals[S, HQ, SPLITS].
    """
    # 1. This program's key head, sequence and part: the tokens first:last, without `last` itself. Heads are
    #    neighbours in memory, so heads are neighbours in the grid, too.
    head, sequence, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + sequence)
    share = tokens_per_part(length, SPLITS, TOKENS)
    first = part * share
    last = tl.minimum(first + share, length)
    if first >= length:
        return
    # 2. The query heads that share this key head.
    GROUP: tl.constexpr = HQ // HKV
    group_row, dim = tl.arange(0, PADDED), tl.arange(0, DH_PADDED)
    row = sequence * HQ + head * GROUP + group_row  # [PADDED]
    query_mask = (group_row < GROUP)[:, None] & (dim < DH)[None, :]  # [PADDED, DH_PADDED]
    queries = tl.load(q + row[:, None] * DH + dim[None, :], mask=query_mask, other=0.0)
    # 3. The running softmax over the part's tokens.
    maximum = tl.full([PADDED], -float("inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    weighted = tl.zeros([PADDED, DH_PADDED], tl.float32)
    for start in range(first, last, TOKENS):
        # a. The block table says where these tokens lie.
        token = start + tl.arange(0, TOKENS)  # [TOKENS]
        valid = token < last
        block = tl.load(tables + sequence * width + token // P, mask=valid, other=0)
        place = (block.to(tl.int64) * P + token % P) * HKV + head  # [TOKENS]: the row of keys[-1, DH]
        address = place[:, None] * DH + dim[None, :]  # [TOKENS, DH_PADDED]
        inside = valid[:, None] & (dim < DH)[None, :]
        k = tl.load(keys + address, mask=inside, other=0.0)
        v = tl.load(values + address, mask=inside, other=0.0)
        # b. Scores and the new maximum. Shrink the sums so far, and add the tile.
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [PADDED, TOKENS]
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])  # [PADDED, TOKENS]
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="ieee")
        maximum = new_maximum
    # 4. With one part the mean is the result. With several parts, store what `_merge` needs.
    if SPLITS == 1:
        mean = weighted / total[:, None]
        tl.store(out + row[:, None] * DH + dim[None, :], mean.to(out.dtype.element_ty), mask=query_mask)
    else:
        index = row * SPLITS + part  # [PADDED]
        tl.store(parts + index[:, None] * DH + dim[None, :], weighted, mask=query_mask)
        tl.store(maxima + index, maximum, mask=group_row < GROUP)
        tl.store(totals + index, total, mask=group_row < GROUP)


@triton.jit
def _merge(
    parts, maxima, totals, lens, out,
    TOKENS: tl.constexpr, HQ: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence): join the head's parts, each relative to its own maximum, to a mean[DH]
    in out[S, HQ, DH].

    parts[S, HQ, SPLITS, DH], maxima and totals[S, HQ, SPLITS], as `_attend` writes them. SPLITS is a power of
    two. A part without tokens (`tokens_per_part`) was not written, and its memory may hold anything.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    part, dim = tl.arange(0, SPLITS), tl.arange(0, DH_PADDED)
    length = tl.load(lens + sequence)
    valid = part * tokens_per_part(length, SPLITS, TOKENS) < length  # [SPLITS]: the part has tokens
    index = (sequence * HQ + head) * SPLITS + part  # [SPLITS]
    maximum = tl.load(maxima + index, mask=valid, other=-float("inf"))
    total = tl.load(totals + index, mask=valid, other=0.0)
    inside = valid[:, None] & (dim < DH)[None, :]
    weighted = tl.load(
        parts + index[:, None] * DH + dim[None, :], mask=inside, other=0.0
    )  # [SPLITS, DH_PADDED]
    shrink = tl.exp(maximum - tl.max(maximum, 0))
    mean = tl.sum(weighted * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(out + (sequence * HQ + head) * DH + dim, mean.to(out.dtype.element_ty), mask=dim < DH)
