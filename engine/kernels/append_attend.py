"""A decode step's attention in one kernel: store each new token's key and value, then attend with its query.
Part 13, as a tuned form of `store_kv.py` and `paged_attention.py`.

Promises the results of `store_kv.py` and `paged_attention.py`, for models with as many key heads as query
heads, if each row belongs to another sequence: a row does not see keys that other rows store in the same
step. A program reads the new token's key and value from the output of the qkv layer, so no program waits
until these are stored. If a sequence is split among programs, a program loads old keys before the qkv layer
is done (with PDL, `pdl.py`: no kernel of the step writes old keys), and the program that ends last joins the
parts, which saves a second kernel.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.paged_attention import tokens_per_part
from engine.kernels.pdl import release, wait
from engine.kernels.running_softmax import add_tile, merge_parts
from engine.kernels.tiles import num_multiprocessors, power_of_2_up_to

# A tile is TOKENS old tokens, which a program reads at a time. SPLIT_TILE: for `_attend_split`.
SPLIT_TILE = {"TOKENS": 32, "num_warps": 1}
SPLIT_TILE_WIDE_HEAD = {"TOKENS": 32, "num_warps": 4}  # Dh > 64: one warp's registers do not hold a tile
# WHOLE_TILE: for `_attend_whole`. The fastest of 48 tiles that were tried, for sequences of unlike lengths.
WHOLE_TILE = {"TOKENS": 64, "num_warps": 4, "num_stages": 3}
WHOLE_TILE_WITHOUT_PDL = WHOLE_TILE | {"num_warps": 2}  # 2 warps: a step of 256 sequences takes 1% less time
MIN_HEAD_DIM = 16  # the smallest inner dimension of a matrix product on tensor cores
MIN_SPLITS = 8  # the fewest programs for which splitting a sequence is faster than `_attend_whole`


class AttendRows(Protocol):
    """Attention of a step's rows: `AppendAttend`, or Part 16's `VerifyAttend`."""

    def __call__(
        self, qkv: Tensor, bias: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor, tables: Tensor,
        lens: Tensor, out: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        """As `AppendAttend.__call__`."""


class AppendAttend:
    """Attention of a decode step, with the scratch memory of the kernel that splits sequences."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        """`head_dim`: a power of two, at least MIN_HEAD_DIM."""
        self.num_heads, self.head_dim = num_heads, head_dim
        self.max_programs = 32  # for the interpreter: enough for tests to split sequences
        if device.type == "cuda":
            self.max_programs = 8 * num_multiprocessors(device)
        self.parts = torch.empty(self.max_programs, head_dim, device=device)
        self.maxima = torch.empty(self.max_programs, device=device)  # of each part
        self.totals = torch.empty(self.max_programs, device=device)  # of each part
        # For each row and head, the number of programs that have stored their part. 0 between two steps.
        self.arrived = torch.zeros(self.max_programs, device=device, dtype=torch.int32)

    def num_splits(self, num_rows: int) -> int:
        """The number of programs among which each head of `num_rows` sequences is split.

        1, or a power of two from MIN_SPLITS on. All heads of all sequences together have at most
        `max_programs` programs if they are split.
        """
        splits = power_of_2_up_to(self.max_programs // (num_rows * self.num_heads))
        return splits if splits >= MIN_SPLITS else 1

    def __call__(
        self, qkv: Tensor, bias: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor, tables: Tensor,
        lens: Tensor, out: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        """Store the new tokens' keys and values, and write attention's result to out[S, D].

        qkv[S, 3·D], to which bias[3·D] is added (None: no bias), keys and values[B, P, H, Dh], slots[S] of
        the new tokens, tables[S, W], lens[S], which count the new token, too. A row with slot -1 stores
        nothing. A row of length 0 is padding: its result is not written. `pdl`: launch with PDL (`pdl.py`).
        """
        S = len(qkv)
        splits = self.num_splits(S)
        shape = {"H": self.num_heads, "DH": self.head_dim, "P": keys.shape[1], "BIAS": bias is not None}
        if splits == 1:
            tile = WHOLE_TILE if pdl else WHOLE_TILE_WITHOUT_PDL
            _attend_whole[(self.num_heads, S)](
                qkv, bias, keys, values, slots, tables, lens, out, tables.stride(0), self.head_dim**-0.5,
                **shape, **tile, ROWS=MIN_DOT_SIZE, PDL=pdl, launch_pdl=pdl,
            )  # fmt: skip
        else:
            tile = SPLIT_TILE if self.head_dim <= 64 else SPLIT_TILE_WIDE_HEAD
            _attend_split[(self.num_heads, S, splits)](
                qkv, bias, keys, values, slots, tables, lens, out,
                self.parts, self.maxima, self.totals, self.arrived, tables.stride(0), self.head_dim**-0.5,
                **shape, **tile, SPLITS=splits, PDL=pdl, launch_pdl=pdl,
            )  # fmt: skip


@triton.jit
def load_new_token(
    qkv, bias, head, sequence, dtype: tl.constexpr, H: tl.constexpr, DH: tl.constexpr, BIAS: tl.constexpr
):
    """The new token's query, key and value, [DH] each, in the dtype of `qkv`. With a bias they are rounded to
    `dtype` after it is added, as if they had been stored.

    DH must be a power of two, which `SingleRow.fits` checks. So tl.arange(0, DH) never leaves the head, and
    the kernels of this file load and store a head without a mask.
    """
    D: tl.constexpr = H * DH
    dim = tl.arange(0, DH)
    address = qkv + sequence * 3 * D + head * DH + dim
    query, key, value = tl.load(address), tl.load(address + D), tl.load(address + 2 * D)  # [DH] each
    if BIAS:
        bias += head * DH
        query = (query.to(tl.float32) + tl.load(bias + dim).to(tl.float32)).to(dtype)
        key = (key.to(tl.float32) + tl.load(bias + dim + D).to(tl.float32)).to(dtype)
        value = (value.to(tl.float32) + tl.load(bias + dim + 2 * D).to(tl.float32)).to(dtype)
    return query, key, value


@triton.jit
def load_old_tokens(
    keys, values, tables, token, valid, head, dim, H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr
):
    """Keys and values[TOKENS, DH] of one head, for the positions token[TOKENS]; 0 where valid[TOKENS] is
    False. `tables` points to the sequence's row of the block tables.
    """
    block = tl.load(tables + token // P, mask=valid, other=0).to(tl.int64)  # [TOKENS]
    address = ((block * P + token % P) * H + head)[:, None] * DH + dim[None, :]  # [TOKENS, DH]
    k = tl.load(keys + address, mask=valid[:, None], other=0.0)  # [TOKENS, DH]
    v = tl.load(values + address, mask=valid[:, None], other=0.0)  # [TOKENS, DH]
    return k, v


@triton.jit
def _attend_whole(
    qkv, bias, keys, values, slots, tables, lens, out, width, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence): its row of out[S, H, DH]. `width` is W of tables[S, W].

    The running softmax begins with the new token. The block numbers of the next tile of old tokens are read
    while the current tile is computed. ROWS is the fewest rows of a product on tensor cores.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + sequence)
    tables += sequence * width
    offset = tl.arange(0, TOKENS)
    block = tl.load(tables + offset // P, mask=offset < length - 1, other=0)  # [TOKENS]
    release(PDL)
    wait(PDL)
    if length == 0:
        return
    dim, dot_row = tl.arange(0, DH), tl.arange(0, ROWS)
    query, key, value = load_new_token(qkv, bias, head, sequence, keys.dtype.element_ty, H, DH, BIAS)
    slot = tl.load(slots + sequence).to(tl.int64)
    tl.store(keys + (slot * H + head) * DH + dim, key, mask=slot >= 0)
    tl.store(values + (slot * H + head) * DH + dim, value, mask=slot >= 0)
    # A product on tensor cores needs ROWS rows. Row 0 is the query. The other rows are zeros, and their
    # results are not read.
    queries = tl.where((dot_row == 0)[:, None], query[None, :], 0.0).to(key.dtype)  # [ROWS, DH]
    # The softmax of the new token alone: its score, the weight 1, its value. Zeros are added to give each of
    # the ROWS rows a copy.
    maximum = tl.zeros([ROWS], tl.float32) + tl.sum(query.to(tl.float32) * key.to(tl.float32), 0) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    weighted = tl.zeros([ROWS, DH], tl.float32) + value.to(tl.float32)[None, :]
    for start in range(0, length - 1, TOKENS):
        token = start + offset
        valid = token < length - 1
        address = ((block.to(tl.int64) * P + token % P) * H + head)[:, None] * DH + dim[None, :]
        k = tl.load(keys + address, mask=valid[:, None], other=0.0)  # [TOKENS, DH]
        v = tl.load(values + address, mask=valid[:, None], other=0.0)  # [TOKENS, DH]
        block = tl.load(tables + (token + TOKENS) // P, mask=token + TOKENS < length - 1, other=0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TOKENS]
        scores = tl.where(valid[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
    mean = tl.sum(tl.where((dot_row == 0)[:, None], weighted / total[:, None], 0.0), 0)  # [DH]
    tl.store(out + (sequence * H + head) * DH + dim, mean.to(out.dtype.element_ty))


@triton.jit
def _attend_split(
    qkv, bias, keys, values, slots, tables, lens, out, parts, maxima, totals, arrived, width, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence, part): as `_attend_whole`, but a sequence's tokens are split among SPLITS
    programs. A part has whole tiles (`tokens_per_part`), so the last parts may have no tokens.
    """
    # 1. This program's head, sequence and part: the tokens first:last, without `last`, of which first:end are
    #    old tokens. The new token, length - 1, is the last token of the last part.
    head, sequence, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dim, offset = tl.arange(0, DH), tl.arange(0, TOKENS)
    length = tl.load(lens + sequence)
    share = tokens_per_part(length, SPLITS, TOKENS)
    first = part * share
    release(PDL)
    if first >= length:
        return
    last = tl.minimum(first + share, length)
    has_new = last == length
    end = tl.minimum(last, length - 1)
    # 2. Load the first tile of old keys and values.
    tables += sequence * width
    k, v = load_old_tokens(keys, values, tables, first + offset, first + offset < end, head, dim, H, DH, P)
    slot = tl.load(slots + sequence).to(tl.int64)
    # 3. Read the query and the new key and value from the qkv layer's output. Store the key and the value.
    wait(PDL)
    query, key, value = load_new_token(qkv, bias, head, sequence, k.dtype, H, DH, BIAS)  # [DH] each
    new_offset = (slot * H + head) * DH + dim  # [DH]
    tl.store(keys + new_offset, key, mask=has_new & (slot >= 0))
    tl.store(values + new_offset, value, mask=has_new & (slot >= 0))
    # 4. The running softmax: the new token, if this part has it, and then the old tokens. The next tile is
    #    loaded while the current tile is computed.
    query = query.to(tl.float32) * scale
    maximum = tl.where(has_new, tl.sum(query * key.to(tl.float32), 0), -float("inf"))
    total = tl.where(has_new, 1.0, 0.0)
    weighted = tl.where(has_new, value.to(tl.float32), 0.0)  # [DH]
    for start in range(first, end, TOKENS):
        token = start + TOKENS + offset
        next_k, next_v = load_old_tokens(keys, values, tables, token, token < end, head, dim, H, DH, P)
        scores = tl.sum(k.to(tl.float32) * query[None, :], 1)  # [TOKENS]
        scores = tl.where(start + offset < end, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum)  # [TOKENS]
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(v.to(tl.float32) * weights[:, None], 0)
        maximum = new_maximum
        k, v = next_k, next_v
    # 5. Store this part of the result. The program that ends last joins all parts.
    row = sequence * H + head
    tl.store(parts + (row * SPLITS + part) * DH + dim, weighted)
    tl.store(maxima + row * SPLITS + part, maximum)
    tl.store(totals + row * SPLITS + part, total)
    tl.debug_barrier()  # all threads have stored their numbers before the program counts itself
    num_parts = tl.cdiv(length, share)
    if tl.atomic_add(arrived + row, 1) == num_parts - 1:
        mean = merge_parts(parts, maxima, totals, row, num_parts, dim, SPLITS, DH)
        tl.store(out + row * DH + dim, mean.to(out.dtype.element_ty))
        tl.store(arrived + row, 0)  # for the next step
