"""Attention of a pass in which sequences have several new tokens each, a row each. Part 16: what verification
needs beside `append_attend.py`, where a row does not see its neighbours of the same pass.

Promises what storing all new keys and values first, and then attending row by row, gives for a model whose
query heads have a key head each. Rows of a sequence are neighbours, in the order of their tokens. Nothing
says how many a sequence has, for a graph's inputs are the same however rows are dealt out: the row above is
of the same sequence if its slot is where this row's block table has the token before. The last row of a
sequence does the work of all of them: old keys are read once, by as many queries as there are, and new keys
and values come from the qkv layer's output, where they are in any case.
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
PROGRAMS_PER_MULTIPROCESSOR = 16  # most of them find that their row is not its sequence's last, and end


class VerifyAttend:
    """The kernel with its scratch memory; called as `AppendAttend` is."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, max_rows: int) -> None:
        self.heads, self.head_dim = num_heads, head_dim
        self.programs = 4 * num_heads  # the interpreter: a few splits, to show that they are right
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
        most = max(self.splits(rows) * rows * _new_token_lanes(rows) for rows in range(1, max_rows + 1))
        self.parts = torch.empty(most * num_heads, head_dim, device=device)
        self.stats = torch.empty(2, most * num_heads, device=device)  # maximum and total of each part's rows
        self.arrived = torch.zeros(max_rows * num_heads, device=device, dtype=torch.int32)

    def splits(self, rows: int) -> int:
        """Among how many programs a head of each row is split: a power of two."""
        fitting = self.programs // (rows * self.heads)
        return min(MAX_SPLITS, max(1, triton.next_power_of_2(fitting + 1) // 2))

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
    """New tokens of a sequence that a program has room for, in a pass of so many rows: a power of two."""
    return MOST_NEW if rows > MIN_DOT_ROWS else MIN_DOT_ROWS


@triton.jit
def _load_rows(qkv, bias, column, valid, dtype: tl.constexpr, BIAS: tl.constexpr):
    """The numbers at qkv[NEW, DH] plus those at bias + column[DH], rounded as if they had been stored; rows
    that are not `valid`[NEW] may be anything.
    """
    x = tl.load(qkv, mask=valid[:, None], other=0.0)  # [NEW, DH]
    if BIAS:
        x = (x.to(tl.float32) + tl.load(bias + column).to(tl.float32)[None, :]).to(dtype)
    return x


@triton.jit
def _verify(
    qkv, bias, keys, values, slots, tables, lens, out, parts, maxima, totals, arrived, S, width, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, NEW: tl.constexpr,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, row, part): if the row is its sequence's last, a part of the old tokens for the queries
    of all its rows; part 0 takes the new tokens, too. Nothing that is read before `wait` changes in a pass.
    """
    # 1. Is there a row below that goes on where mine ends?
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row)
    below = row + 1
    # The position of the token before that row's; and it lies in this row's slot if it is this row's token.
    previous = tl.load(lens + below, mask=below < S, other=0) - 2
    block = tl.load(tables + below * width + previous // P, mask=previous >= 0, other=-1)
    goes_on = (previous >= 0) & (tl.load(slots + row) == block * P + previous % P)
    release(PDL)
    if (length == 0) | goes_on:
        return
    # 2. Which rows above are my sequence's? Row `row - n` has the n-th token before my last.
    n, d, i = tl.arange(0, NEW), tl.arange(0, DH), tl.arange(0, TOKENS)
    tables += row * width
    above, position = row - n, length - 1 - n  # [NEW] each
    valid = (above >= 0) & (position >= 0)  # [NEW]
    block = tl.load(tables + position // P, mask=valid, other=0)  # [NEW]
    slot = tl.load(slots + above, mask=valid, other=-1)  # [NEW]
    valid = valid & (slot == block * P + position % P)
    # 3. My part of the old tokens: the first keys and values are on their way while the qkv layer computes.
    old = length - tl.sum(valid.to(tl.int32), 0)
    share = tl.maximum(tokens_per_part(old, SPLITS, TOKENS), TOKENS)
    first = part * share
    last = tl.minimum(first + share, old)
    if (part > 0) & (first >= old):
        return
    k, v = load_old_tokens(keys, values, tables, first + i, first + i < last, head, d, H, DH, P)
    wait(PDL)
    # 4. The queries; new keys and values, each seen by its own row and those below; they go to their pages.
    D: tl.constexpr = H * DH
    column = head * DH + d  # [DH]: of the queries, among D
    numbers = qkv + above.to(tl.int64)[:, None] * 3 * D + column[None, :]  # [NEW, DH]
    queries = _load_rows(numbers, bias, column, valid, k.dtype, BIAS)  # [NEW, DH]
    maximum = tl.full([NEW], -float("inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    weighted = tl.zeros([NEW, DH], tl.float32)
    if part == 0:
        key = _load_rows(numbers + D, bias, D + column, valid, k.dtype, BIAS)  # [NEW, DH]
        value = _load_rows(numbers + 2 * D, bias, 2 * D + column, valid, k.dtype, BIAS)  # [NEW, DH]
        address = (slot.to(tl.int64) * H + head)[:, None] * DH + d[None, :]  # [NEW, DH]
        tl.store(keys + address, key, mask=valid[:, None])
        tl.store(values + address, value, mask=valid[:, None])
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale  # [NEW, NEW]
        # A row sees itself and those above it. One that is not valid sees itself, so that its sum is not 0.
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
    # 6. Alone, the result is done. Else the program that ends last joins the parts.
    result = out + (above * H + head)[:, None] * DH + d[None, :]  # [NEW, DH]
    if SPLITS == 1:
        tl.store(result, (weighted / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    else:
        index = row * H + head
        part_rows = (index * SPLITS + part) * NEW + n
        tl.store(parts + part_rows[:, None] * DH + d[None, :], weighted)
        tl.store(maxima + part_rows, maximum)
        tl.store(totals + part_rows, total)
        tl.debug_barrier()
        count = tl.maximum(tl.cdiv(old, share), 1)
        if tl.atomic_add(arrived + index, 1) == count - 1:
            maximum = tl.full([NEW], -float("inf"), tl.float32)
            total = tl.zeros([NEW], tl.float32)
            weighted = tl.zeros([NEW, DH], tl.float32)
            for other in range(0, count):
                part_rows = (index * SPLITS + other) * NEW + n  # [NEW]
                part_maximum = tl.load(maxima + part_rows, volatile=True)  # [NEW]
                part_total = tl.load(totals + part_rows, volatile=True)  # [NEW]
                part_weighted = tl.load(parts + part_rows[:, None] * DH + d[None, :], volatile=True)
                new = tl.maximum(maximum, part_maximum)
                shrink, factor = tl.exp(maximum - new), tl.exp(part_maximum - new)
                total = total * shrink + part_total * factor
                weighted = weighted * shrink[:, None] + part_weighted * factor[:, None]
                maximum = new
            tl.store(result, (weighted / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
            tl.store(arrived + index, 0)
