"""Attention of a forward pass in which a sequence may have several new tokens, one row each. Part 16: what
verification needs beside `append_attend.py`, where a row does not see other rows of the same pass.

Promises the results of storing all new keys and values first and then attending row by row, for models with
as many key heads as query heads. The rows of a sequence must be neighbours, in the order of their tokens.

No input says how many rows a sequence has, since the inputs of a CUDA graph have the same shapes for any
mixture of sequences. The kernel finds out from slots and block tables: the row above belongs to the same
sequence if its slot is the place of the previous token in this row's block table.

The last row of a sequence computes all rows of the sequence. So old keys are read once for all queries of
the sequence. New keys and values are read from the output of the qkv layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.append_attend import load_old_tokens
from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.paged_attention import tokens_per_part
from engine.kernels.pdl import release, wait
from engine.kernels.running_softmax import add_tile
from engine.kernels.tiles import num_multiprocessors, power_of_2_up_to

MAX_NEW_TOKENS = 32  # the most new tokens, and so rows, of a sequence in a pass
TOKENS = 64  # old tokens that a program reads at a time
MAX_SPLITS = 32  # the most programs among which a sequence is split, for each head
PROGRAMS_PER_MULTIPROCESSOR = 16  # many, since only the programs of a sequence's last row have work


class VerifyAttend:
    """Attention of a verification pass, with its scratch memory and the interface of `AppendAttend`."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, max_rows: int) -> None:
        """`head_dim`: a power of two, at least MIN_HEAD_DIM of append_attend.py. `max_rows`: the most rows of
        a pass.
        """
        self.num_heads, self.head_dim = num_heads, head_dim
        self.max_programs = 4 * num_heads  # for the interpreter: enough for tests to split sequences
        if device.type == "cuda":
            self.max_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
        # A part has a row for each new token that a program has room for. The scratch memory is enough for
        # any pass of up to `max_rows` rows.
        part_rows = [self.num_splits(S) * S * _new_token_lanes(S) for S in range(1, max_rows + 1)]
        max_part_rows = max(part_rows) * num_heads
        self.parts = torch.empty(max_part_rows, head_dim, device=device)
        self.maxima = torch.empty(max_part_rows, device=device)
        self.totals = torch.empty(max_part_rows, device=device)
        # For each row and head, the number of programs that have stored their part. 0 between two passes.
        self.arrived = torch.zeros(max_rows * num_heads, device=device, dtype=torch.int32)

    def num_splits(self, num_rows: int) -> int:
        """The number of programs among which a head's old tokens are split in a pass of `num_rows` rows: a
        power of two from 1 to MAX_SPLITS.
        """
        splits = power_of_2_up_to(self.max_programs // (num_rows * self.num_heads))
        return min(MAX_SPLITS, max(1, splits))

    def __call__(
        self, qkv: Tensor, bias: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor, tables: Tensor,
        lens: Tensor, out: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        """Store the new tokens' keys and values, and write attention's result to out[S, D].

        qkv[S, 3·D], to which bias[3·D] is added (None: no bias), keys and values[B, P, H, Dh], slots[S] of
        the rows' tokens, tables[S, W], lens[S], which count the row's own token and the tokens before. A
        sequence may have at most MAX_NEW_TOKENS rows, which are neighbours. A row of length 0 is padding: its
        result is not written. `pdl`: launch with PDL (`pdl.py`).
        """
        S = len(qkv)
        splits = self.num_splits(S)
        _verify[(self.num_heads, S, splits)](
            qkv, bias, keys, values, slots, tables, lens, out,
            self.parts, self.maxima, self.totals, self.arrived, S, tables.stride(0), self.head_dim**-0.5,
            H=self.num_heads, DH=self.head_dim, P=keys.shape[1], TOKENS=TOKENS, NEW=_new_token_lanes(S),
            SPLITS=splits, BIAS=bias is not None, PDL=pdl, launch_pdl=pdl, num_warps=4, num_stages=2,
        )  # fmt: skip


def _new_token_lanes(rows: int) -> int:
    """The number of a sequence's new tokens that a program has room for, in a pass of `rows` rows: a power
    of two.
    """
    return MAX_NEW_TOKENS if rows > MIN_DOT_SIZE else MIN_DOT_SIZE


@triton.jit
def _load_qkv_rows(qkv_ptr, bias, column, valid, dtype: tl.constexpr, BIAS: tl.constexpr):
    """Load the numbers at the pointers qkv_ptr[NEW, DH], and add bias[column[DH]] -> [NEW, DH], rounded to
    `dtype` as if they had been stored. Rows with a False in valid[NEW] may hold anything.
    """
    x = tl.load(qkv_ptr, mask=valid[:, None], other=0.0)  # [NEW, DH]
    if BIAS:
        x = (x.to(tl.float32) + tl.load(bias + column).to(tl.float32)[None, :]).to(dtype)
    return x


@triton.jit
def _is_continued(slots, tables, lens, row, S, width, P: tl.constexpr):
    """Whether the next row belongs to the sequence of `row`. It does if, by the next row's block table, the
    token before the next row's token lies in the slot of `row`. slots[S], tables[S, width], lens[S].
    """
    next_row = row + 1
    # The next row's length counts its own token, so the token before that has the position length - 2.
    before_next = tl.load(lens + next_row, mask=next_row < S, other=0) - 2
    block = tl.load(tables + next_row * width + before_next // P, mask=before_next >= 0, other=-1)
    slot_before_next = block * P + before_next % P
    return (before_next >= 0) & (tl.load(slots + row) == slot_before_next)


@triton.jit
def _rows_of_sequence(slots, table, row, length, NEW: tl.constexpr, P: tl.constexpr):
    """The NEW rows that end with `row`, the last row of a sequence, counted backwards -> (rows[NEW],
    their slots[NEW], in_sequence[NEW]: whether the row belongs to the sequence; rows[0] does).

    `table` is the sequence's block table, and `length` counts all of its tokens. The row that is n rows back
    belongs to the sequence if its slot is the place, in the block table, of the token n positions back.
    """
    rows_back = tl.arange(0, NEW)
    rows, position = row - rows_back, length - 1 - rows_back
    exists = (rows >= 0) & (position >= 0)
    block = tl.load(table + position // P, mask=exists, other=0)
    row_slots = tl.load(slots + rows, mask=exists, other=-1)
    return rows, row_slots, exists & (row_slots == block * P + position % P)


@triton.jit
def _attend_new(queries, key, value, in_sequence, scale, NEW: tl.constexpr):
    """Begin a running softmax with the new tokens of a sequence, for queries, key and value[NEW, DH], whose
    rows are counted backwards -> maximum[NEW], total[NEW], weighted[NEW, DH], as in `add_tile`.
    """
    # A row sees its own token and those of earlier rows: the columns from its own number on. A row that is
    # not in the sequence sees only itself, so that its total is not 0.
    row, column = tl.arange(0, NEW)[:, None], tl.arange(0, NEW)[None, :]
    visible = (in_sequence[None, :] & (column >= row)) | (column == row)  # [NEW, NEW]
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(visible, scores, -float("inf"))
    maximum = tl.max(scores, 1)
    weights = tl.exp(scores - maximum[:, None])
    return maximum, tl.sum(weights, 1), tl.dot(weights.to(value.dtype), value, input_precision="ieee")


@triton.jit
def _verify(
    qkv, bias, keys, values, slots, tables, lens, out, parts, maxima, totals, arrived, S, width, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, NEW: tl.constexpr,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, row, part): if the row is the last row of its sequence, attend with the queries of all
    rows of the sequence to a part of the old tokens. Part 0 also has the new tokens.

    Memory that is read before `wait` does not change during a pass. NEW is the number of rows that the
    program has room for. They are counted backwards, from this row.
    """
    # 1. Only the last row of a sequence goes on.
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row)
    is_continued = _is_continued(slots, tables, lens, row, S, width, P)
    release(PDL)
    if (length == 0) | is_continued:
        return
    tables += row * width
    rows, row_slots, in_sequence = _rows_of_sequence(slots, tables, row, length, NEW, P)  # [NEW] each
    # 2. This part's old tokens are first:last. The first tile is loaded while the qkv layer still computes.
    dim, offset = tl.arange(0, DH), tl.arange(0, TOKENS)
    num_old = length - tl.sum(in_sequence.to(tl.int32), 0)
    share = tl.maximum(tokens_per_part(num_old, SPLITS, TOKENS), TOKENS)  # not 0: a divisor below
    first = part * share
    last = tl.minimum(first + share, num_old)
    if (part > 0) & (first >= num_old):
        return
    k, v = load_old_tokens(keys, values, tables, first + offset, first + offset < last, head, dim, H, DH, P)
    wait(PDL)
    # 3. The queries. Part 0 stores the new keys and values in their pages, and begins the softmax with them.
    D: tl.constexpr = H * DH
    column = head * DH + dim  # [DH]: the head's columns of a row of queries
    qkv_ptr = qkv + rows.to(tl.int64)[:, None] * 3 * D + column[None, :]  # [NEW, DH]
    queries = _load_qkv_rows(qkv_ptr, bias, column, in_sequence, k.dtype, BIAS)  # [NEW, DH]
    maximum = tl.full([NEW], -float("inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    weighted = tl.zeros([NEW, DH], tl.float32)
    if part == 0:
        key = _load_qkv_rows(qkv_ptr + D, bias, D + column, in_sequence, k.dtype, BIAS)  # [NEW, DH]
        value = _load_qkv_rows(qkv_ptr + 2 * D, bias, 2 * D + column, in_sequence, k.dtype, BIAS)  # [NEW, DH]
        kv_offset = (row_slots.to(tl.int64) * H + head)[:, None] * DH + dim[None, :]  # [NEW, DH]
        tl.store(keys + kv_offset, key, mask=in_sequence[:, None])
        tl.store(values + kv_offset, value, mask=in_sequence[:, None])
        maximum, total, weighted = _attend_new(queries, key, value, in_sequence, scale, NEW)
    # 4. The running softmax over the old tokens. The next tile is loaded while the current tile is computed.
    for start in range(first, last, TOKENS):
        token = start + TOKENS + offset
        next_k, next_v = load_old_tokens(keys, values, tables, token, token < last, head, dim, H, DH, P)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [NEW, TOKENS]
        scores = tl.where((start + offset < last)[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
        k, v = next_k, next_v
    # 5. With one part the mean is the result. With several parts the program that ends last joins the parts.
    out_ptr = out + (rows * H + head)[:, None] * DH + dim[None, :]  # [NEW, DH]
    if SPLITS == 1:
        tl.store(out_ptr, (weighted / total[:, None]).to(out.dtype.element_ty), mask=in_sequence[:, None])
    else:
        index = row * H + head
        part_row = (index * SPLITS + part) * NEW + tl.arange(0, NEW)  # [NEW]
        tl.store(parts + part_row[:, None] * DH + dim[None, :], weighted)
        tl.store(maxima + part_row, maximum)
        tl.store(totals + part_row, total)
        tl.debug_barrier()  # all threads have stored their numbers before the program counts itself
        num_parts = tl.maximum(tl.cdiv(num_old, share), 1)
        if tl.atomic_add(arrived + index, 1) == num_parts - 1:
            mean = _join_parts(parts, maxima, totals, index, num_parts, SPLITS, NEW, DH)  # [NEW, DH]
            tl.store(out_ptr, mean.to(out.dtype.element_ty), mask=in_sequence[:, None])
            tl.store(arrived + index, 0)  # for the next pass


@triton.jit
def _join_parts(
    parts, maxima, totals, index, num_parts, SPLITS: tl.constexpr, NEW: tl.constexpr, DH: tl.constexpr
):
    """The mean[NEW, DH] of the first `num_parts` parts at `index`, each relative to its own maximum.

    parts[rows · H, SPLITS, NEW, DH], maxima and totals[rows · H, SPLITS, NEW]. Other programs have just
    written the parts, and a cache may hold older numbers. `volatile` loads do not read from such caches.
    """
    lane, dim = tl.arange(0, NEW), tl.arange(0, DH)
    maximum = tl.full([NEW], -float("inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    weighted = tl.zeros([NEW, DH], tl.float32)
    for part in range(0, num_parts):
        part_row = (index * SPLITS + part) * NEW + lane  # [NEW]
        part_maximum = tl.load(maxima + part_row, volatile=True)  # [NEW]
        part_total = tl.load(totals + part_row, volatile=True)  # [NEW]
        part_weighted = tl.load(parts + part_row[:, None] * DH + dim[None, :], volatile=True)  # [NEW, DH]
        new_maximum = tl.maximum(maximum, part_maximum)
        shrink, factor = tl.exp(maximum - new_maximum), tl.exp(part_maximum - new_maximum)
        total = total * shrink + part_total * factor
        weighted = weighted * shrink[:, None] + part_weighted * factor[:, None]
        maximum = new_maximum
    return weighted / total[:, None]
