"""Attention of a pass in which sequences have several new tokens each, a row each. Part 16: what verification
needs beside `append_attend.py`, where a row does not see its neighbours of the same pass.

Promises what storing all new keys and values first, and then attending row by row, gives for a model whose
query heads have a key head each. Rows of a sequence are neighbours, in the order of their tokens. No input
says how many rows a sequence has, since a graph's inputs are the same for any mixture: the row above is of
the same sequence if its slot is where this row's block table has the token before. The last row of a sequence
does the work of all its rows. So old keys are read once for all its queries, and new keys and values are
taken from the qkv layer's output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.append_attend import load_old_tokens
from engine.kernels.paged_attention import MIN_DOT_ROWS, tokens_per_part
from engine.kernels.pdl import release, wait
from engine.kernels.running_softmax import add_tile

MOST_NEW = 32  # new tokens of a sequence, at most
TOKENS = 64  # old tokens that a program reads at a time
MAX_SPLITS = 32  # programs among which a sequence is split, at most
PROGRAMS_PER_MULTIPROCESSOR = 16  # many, because those whose row is not its sequence's last end at once


class VerifyAttend:
    """The kernel with its scratch memory; called as `AppendAttend` is."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, max_rows: int) -> None:
        self.heads, self.head_dim = num_heads, head_dim
        self.programs = 4 * num_heads  # the interpreter: a few splits, to show that they are right
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
        part_rows = (self.splits(rows) * rows * _new_token_lanes(rows) for rows in range(1, max_rows + 1))
        max_part_rows = max(part_rows) * num_heads  # of any number of rows up to max_rows
        self.parts = torch.empty(max_part_rows, head_dim, device=device)
        self.stats = torch.empty(2, max_part_rows, device=device)  # maximum and total of each part's rows
        # Of each row and head: how many of its programs have stored their part. 0 between two passes.
        self.arrived = torch.zeros(max_rows * num_heads, device=device, dtype=torch.int32)

    def splits(self, rows: int) -> int:
        """Among how many programs the old tokens of a row's head are split: a power of two."""
        max_splits = self.programs // (rows * self.heads)
        splits = triton.next_power_of_2(max_splits + 1) // 2  # the largest power of two up to `max_splits`
        return min(MAX_SPLITS, max(1, splits))

    def __call__(
        self, qkv: Tensor, bias: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor, tables: Tensor,
        lens: Tensor, out: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        """qkv[S, 3·D] (plus bias[3·D]), keys and values[B, P, H, Dh], slots[S], tables[S, W], lens[S] with
        the row's own token -> out[S, D]. A length of 0: a padding row. At most MOST_NEW rows a sequence.
        """
        S = len(qkv)
        splits = self.splits(S)
        _verify[(self.heads, S, splits)](
            qkv, bias, keys, values, slots, tables, lens, out, self.parts, *self.stats, self.arrived,
            S, tables.stride(0), self.head_dim**-0.5,
            H=self.heads, DH=self.head_dim, P=keys.shape[1], TOKENS=TOKENS, NEW=_new_token_lanes(S),
            SPLITS=splits, BIAS=bias is not None, PDL=pdl, launch_pdl=pdl, num_warps=4, num_stages=2,
        )  # fmt: skip


def _new_token_lanes(rows: int) -> int:
    """New tokens of a sequence that a program has room for, in a pass of this many rows: a power of two."""
    return MOST_NEW if rows > MIN_DOT_ROWS else MIN_DOT_ROWS


@triton.jit
def _load_rows(qkv_ptr, bias, column, valid, dtype: tl.constexpr, BIAS: tl.constexpr):
    """The numbers behind the pointers qkv_ptr[NEW, DH], plus bias[column[DH]]: rounded as if they had been
    stored. Rows that are not `valid`[NEW] may be anything.
    """
    x = tl.load(qkv_ptr, mask=valid[:, None], other=0.0)  # [NEW, DH]
    if BIAS:
        x = (x.to(tl.float32) + tl.load(bias + column).to(tl.float32)[None, :]).to(dtype)
    return x


@triton.jit
def _verify(
    qkv, bias, keys, values, slots, tables, lens, out, parts, maxima, totals, arrived, S, width, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, NEW: tl.constexpr,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, row, part): if the row is its sequence's last, a part of the old tokens, for the queries
    of all the sequence's rows. Part 0 takes the new tokens, too. What is read before `wait` does not change
    during a pass.
    """
    # 1. Only a sequence's last row works. I am not it if the row below continues me: if its block table puts
    #    the token before its own into my slot.
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row)
    next_row = row + 1
    # A position. The next row's own token is at its length - 1, so the one before is at its length - 2.
    before_next = tl.load(lens + next_row, mask=next_row < S, other=0) - 2
    block = tl.load(tables + next_row * width + before_next // P, mask=before_next >= 0, other=-1)
    is_continued = (before_next >= 0) & (tl.load(slots + row) == block * P + before_next % P)
    release(PDL)
    if (length == 0) | is_continued:
        return
    # 2. Which rows above are my sequence's? Row `row - n` has the token n positions before my own, if that
    #    token's place in my block table is its slot.
    n, d, i = tl.arange(0, NEW), tl.arange(0, DH), tl.arange(0, TOKENS)
    tables += row * width
    above, position = row - n, length - 1 - n  # [NEW] each
    valid = (above >= 0) & (position >= 0)  # [NEW]
    block = tl.load(tables + position // P, mask=valid, other=0)  # [NEW]
    slot = tl.load(slots + above, mask=valid, other=-1)  # [NEW]
    valid = valid & (slot == block * P + position % P)
    # 3. My part of the old tokens: the first keys and values are on their way while the qkv layer computes.
    num_old = length - tl.sum(valid.to(tl.int32), 0)
    share = tl.maximum(tokens_per_part(num_old, SPLITS, TOKENS), TOKENS)  # not 0: `num_parts` divides by it
    first = part * share
    last = tl.minimum(first + share, num_old)
    if (part > 0) & (first >= num_old):
        return
    k, v = load_old_tokens(keys, values, tables, first + i, first + i < last, head, d, H, DH, P)
    wait(PDL)
    # 4. The queries. Part 0 stores the new keys and values in their pages, and begins the softmax with them:
    #    a row sees its own and those of the rows above.
    D: tl.constexpr = H * DH
    column = head * DH + d  # [DH]: my head's, among a row's D queries
    qkv_ptr = qkv + above.to(tl.int64)[:, None] * 3 * D + column[None, :]  # [NEW, DH]
    queries = _load_rows(qkv_ptr, bias, column, valid, k.dtype, BIAS)  # [NEW, DH]
    maximum = tl.full([NEW], -float("inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    weighted = tl.zeros([NEW, DH], tl.float32)
    if part == 0:
        key = _load_rows(qkv_ptr + D, bias, D + column, valid, k.dtype, BIAS)  # [NEW, DH]
        value = _load_rows(qkv_ptr + 2 * D, bias, 2 * D + column, valid, k.dtype, BIAS)  # [NEW, DH]
        kv_offset = (slot.to(tl.int64) * H + head)[:, None] * DH + d[None, :]  # [NEW, DH]
        tl.store(keys + kv_offset, key, mask=valid[:, None])
        tl.store(values + kv_offset, value, mask=valid[:, None])
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale  # [NEW, NEW]
        # n counts upwards, so row n sees the columns from n on. A row that is not valid sees itself alone, so
        # that its sum is not 0.
        visible = (valid[None, :] & (n[None, :] >= n[:, None])) | (n[None, :] == n[:, None])  # [NEW, NEW]
        scores = tl.where(visible, scores, -float("inf"))
        maximum = tl.max(scores, 1)
        weights = tl.exp(scores - maximum[:, None])
        total = tl.sum(weights, 1)
        weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    # 5. The old tokens, with a running softmax; the next ones are on their way meanwhile.
    for start in range(first, last, TOKENS):
        token = start + TOKENS + i
        next_k, next_v = load_old_tokens(keys, values, tables, token, token < last, head, d, H, DH, P)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [NEW, TOKENS]
        scores = tl.where((start + i < last)[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
        k, v = next_k, next_v
    # 6. Alone, my result is the sequence's. Else I store my part, and the program that ends last joins them.
    out_ptr = out + (above * H + head)[:, None] * DH + d[None, :]  # [NEW, DH]
    if SPLITS == 1:
        tl.store(out_ptr, (weighted / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    else:
        index = row * H + head
        part_row = (index * SPLITS + part) * NEW + n  # [NEW]
        tl.store(parts + part_row[:, None] * DH + d[None, :], weighted)
        tl.store(maxima + part_row, maximum)
        tl.store(totals + part_row, total)
        tl.debug_barrier()  # all threads' parts are stored before this program is counted
        num_parts = tl.maximum(tl.cdiv(num_old, share), 1)
        if tl.atomic_add(arrived + index, 1) == num_parts - 1:
            mean = _join_parts(parts, maxima, totals, index, num_parts, SPLITS, NEW, DH)  # [NEW, DH]
            tl.store(out_ptr, mean.to(out.dtype.element_ty), mask=valid[:, None])
            tl.store(arrived + index, 0)  # ready for the next pass


@triton.jit
def _join_parts(
    parts, maxima, totals, index, num_parts, SPLITS: tl.constexpr, NEW: tl.constexpr, DH: tl.constexpr
):
    """The mean[NEW, DH] of the first `num_parts` parts at `index` in parts[rows · H, SPLITS, NEW, DH], each
    relative to its own maximum: maxima and totals[rows · H, SPLITS, NEW]. Other programs have just written
    them: `volatile` reads past caches that do not have it yet.
    """
    n, d = tl.arange(0, NEW), tl.arange(0, DH)
    maximum = tl.full([NEW], -float("inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    weighted = tl.zeros([NEW, DH], tl.float32)
    for part in range(0, num_parts):
        part_row = (index * SPLITS + part) * NEW + n  # [NEW]
        part_maximum = tl.load(maxima + part_row, volatile=True)  # [NEW]
        part_total = tl.load(totals + part_row, volatile=True)  # [NEW]
        part_weighted = tl.load(parts + part_row[:, None] * DH + d[None, :], volatile=True)  # [NEW, DH]
        new_maximum = tl.maximum(maximum, part_maximum)
        shrink, factor = tl.exp(maximum - new_maximum), tl.exp(part_maximum - new_maximum)
        total = total * shrink + part_total * factor
        weighted = weighted * shrink[:, None] + part_weighted * factor[:, None]
        maximum = new_maximum
    return weighted / total[:, None]
