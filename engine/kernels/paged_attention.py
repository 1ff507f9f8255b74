"""Decode attention that reads pages where they lie: one new token of each of S sequences. A Triton kernel.
Part 13.

Promises what `Gathered` of `engine/attention/paged.py` gives, up to rounding, and copies nothing together.
A program takes one key head of one sequence, with all query heads that share it, and walks over its tokens
with a running softmax (Part 9). One long sequence alone would keep one program per head busy and leave the
rest of the GPU idle: so its tokens are split among several programs, and `_merge` joins their results
(split-K). The grid depends on the number of sequences only; how far each program has to read is worked out
on the GPU from `lens`, so that a CUDA graph stays valid while sequences grow. With TRITON_INTERPRET=1 it
runs on a CPU, slowly. Source: Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.paged import Pages

TILE = 64  # tokens a program reads at a time
MIN_DOT_ROWS = 16  # of a matrix product on tensor cores: fewer query heads are padded
MAX_SPLITS = 64
MAX_HEAD_DIM = 256


class PagedAttention:
    """A step's plan, as `paged_decode` makes one for a CPU: (pages, query heads, a layer's keys)."""

    def __init__(self, pages: Pages, num_heads: int, keys: Tensor) -> None:
        """Raises ValueError for heads that are too wide."""
        if keys.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim={keys.shape[-1]}: this kernel accepts up to {MAX_HEAD_DIM}")
        self.tables, self.lens = pages.on(keys.device)  # [S, W], [S]
        self.splits = num_splits(len(pages.lens), keys.shape[2], keys.device)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [S, Hq, Dh]."""
        return paged_attention(q, keys, values, self.tables, self.lens, self.splits)


def num_splits(num_sequences: int, num_kv_heads: int, device: torch.device) -> int:
    """Among how many programs each sequence is split: enough for two on every multiprocessor, a power of two.

    Nothing but the batch's shape goes in, since a captured graph cannot change its grid.
    """
    if device.type != "cuda":
        return 4  # any number will do: the interpreter runs programs one after the other
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(wanted, num_sequences * num_kv_heads)))


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, splits: int = 1
) -> Tensor:
    """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh], tables[S, W], lens[S] -> [S, Hq, Dh].

    Sequence s has lens[s] tokens; token i lies in block tables[s, i // P] at place i % P. What lies behind a
    sequence's end, or in blocks that are not its own, is not read. A length of 0: a padding row, whose
    result may be anything. `splits` is a power of two.
    """
    (S, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
    q, out = q.contiguous(), torch.empty(S, Hq, Dh, dtype=q.dtype, device=q.device)
    shape = {"HQ": Hq, "DH": Dh, "DH_PADDED": max(16, triton.next_power_of_2(Dh)), "SPLITS": splits}
    parts = out if splits == 1 else q.new_empty(S, Hq, splits, Dh, dtype=torch.float32)
    stats = q.new_empty(2, S, Hq, splits, dtype=torch.float32)  # maximum and total of each part
    _attend[(Hkv, S, splits)](
        q, keys, values, tables, lens, out, parts, stats[0], stats[1], tables.stride(0), Dh**-0.5,
        HKV=Hkv, P=P, TOKENS=TILE, PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(Hq // Hkv)), **shape,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(Hq, S)](parts, stats[0], stats[1], lens, out, TOKENS=TILE, **shape)
    return out


@triton.jit
def tokens_per_part(length, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of each part: whole tiles, so that the last parts of a short sequence have nothing to do."""
    return tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS


@triton.jit
def _attend(
    q, keys, values, tables, lens, out, parts, maxima, totals, width, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, P: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One part of the tokens of one sequence, for one key head and the query heads that share it: program
    (key head, sequence, part). tables[S, width]; PADDED and DH_PADDED are powers of two, at least 16.

    A part is `tokens_per_part` tokens; a part with none writes nothing. With SPLITS = 1 the mean goes to
    out[S, HQ, DH]. Else each query head's weighted sum goes to parts[S, HQ, SPLITS, DH], the maximum to which
    it is relative to maxima[S, HQ, SPLITS], and its total to totals[S, HQ, SPLITS].
    """
    # 1. Which key head, which sequence, and which part of its tokens is mine? Heads are neighbours in memory
    #    and in the grid.
    head, sequence, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + sequence)
    share = tokens_per_part(length, SPLITS, TOKENS)
    first = part * share
    last = tl.minimum(first + share, length)
    if first >= length:
        return
    # 2. The query heads that share this key head.
    GROUP: tl.constexpr = HQ // HKV
    g, d = tl.arange(0, PADDED), tl.arange(0, DH_PADDED)
    row = sequence * HQ + head * GROUP + g  # [PADDED]
    mine = (g < GROUP)[:, None] & (d < DH)[None, :]  # [PADDED, DH_PADDED]
    queries = tl.load(q + row[:, None] * DH + d[None, :], mask=mine, other=0.0)
    # 3. The running softmax over my tokens.
    maximum = tl.full([PADDED], -float("inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    weighted = tl.zeros([PADDED, DH_PADDED], tl.float32)
    for start in range(first, last, TOKENS):
        # a. The block table says where these tokens lie.
        token = start + tl.arange(0, TOKENS)  # [TOKENS]
        valid = token < last
        block = tl.load(tables + sequence * width + token // P, mask=valid, other=0)
        place = (block.to(tl.int64) * P + token % P) * HKV + head  # [TOKENS]: the row of keys[-1, DH]
        address = place[:, None] * DH + d[None, :]  # [TOKENS, DH_PADDED]
        inside = valid[:, None] & (d < DH)[None, :]
        k = tl.load(keys + address, mask=inside, other=0.0)
        v = tl.load(values + address, mask=inside, other=0.0)
        # b. Scores, a new maximum, and what was summed so far shrinks.
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [PADDED, TOKENS]
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp(maximum - new)
        weights = tl.exp(scores - new[:, None])  # [PADDED, TOKENS]
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="ieee")
        maximum = new
    # 4. Alone, the result is done. Else it is one part of it.
    if SPLITS == 1:
        mean = weighted / total[:, None]
        tl.store(out + row[:, None] * DH + d[None, :], mean.to(out.dtype.element_ty), mask=mine)
    else:
        index = row * SPLITS + part  # [PADDED]
        tl.store(parts + index[:, None] * DH + d[None, :], weighted, mask=mine)
        tl.store(maxima + index, maximum, mask=g < GROUP)
        tl.store(totals + index, total, mask=g < GROUP)


@triton.jit
def _merge(
    parts, maxima, totals, lens, out,
    TOKENS: tl.constexpr, HQ: tl.constexpr, DH: tl.constexpr, DH_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence): its parts, each relative to its own maximum, become a mean[DH] in out.

    parts[S, HQ, SPLITS, DH], maxima and totals[S, HQ, SPLITS]; SPLITS is a power of two. A part without
    tokens (`tokens_per_part`) was never written: what lies there may be anything.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    part, d = tl.arange(0, SPLITS), tl.arange(0, DH_PADDED)
    length = tl.load(lens + sequence)
    valid = part * tokens_per_part(length, SPLITS, TOKENS) < length  # the others were never written
    index = (sequence * HQ + head) * SPLITS + part  # [SPLITS]
    maximum = tl.load(maxima + index, mask=valid, other=-float("inf"))
    total = tl.load(totals + index, mask=valid, other=0.0)
    inside = valid[:, None] & (d < DH)[None, :]
    weighted = tl.load(
        parts + index[:, None] * DH + d[None, :], mask=inside, other=0.0
    )  # [SPLITS, DH_PADDED]
    shrink = tl.exp(maximum - tl.max(maximum, 0))
    mean = tl.sum(weighted * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(out + (sequence * HQ + head) * DH + d, mean.to(out.dtype.element_ty), mask=d < DH)
