"""A decode step's attention for Llama and Qwen3 in one kernel, as `append_attend.py` for GPT-2. Part 20.

The kernel norms and rotates each new token's queries and key, stores the key and the value in their page, and
attends with the queries. Promises the results of `rotate_and_store` followed by `paged_attention.py`, if each
row belongs to another sequence: a row does not see keys that other rows store in the same step. The new
token's numbers stay in registers. The block numbers of the next tile of old tokens are read while the current
tile is computed.

In names, qa and qb are the first and the second halves of queries, and ka and kb those of keys. A pair that
is rotated has a number of each half, at the same place.
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.running_softmax import add_tile
from engine.kernels.tiles import num_multiprocessors
from engine.models.llama import Attention, Block, LlamaConfig
from engine.models.llama import Model as Llama

# Here the inner dimension of a product on tensor cores is half a head, and must be at least 16.
MIN_HEAD_DIM_OF_HALVES = 32
# TOKENS: old tokens that a program reads at a time. The fastest of 48 tiles that were tried, for sequences of
# unlike lengths.
TILE = {"TOKENS": 64, "num_warps": 4, "num_stages": 3}
PROGRAMS_PER_MULTIPROCESSOR = 2  # with fewer programs, splitting sequences is faster (measured on an H200)

Gains = tuple[Tensor | None, Tensor | None]  # gains[Dh] of the queries' norm and of the keys' norm


def prefers_attend_rows(config: LlamaConfig, rows: int, device: torch.device) -> bool:
    """Whether `attend_rows` computes a model with this config, and is faster than `rotate_and_store` and
    `paged_attention` in a step of `rows` sequences.
    """
    min_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    return config.head_dim >= MIN_HEAD_DIM_OF_HALVES and rows * config.num_kv_heads >= min_programs


def attend_rows(
    config: LlamaConfig, qkv: Tensor, cos: Tensor, sin: Tensor, gains: Gains, keys: Tensor,
    values: Tensor, slots: Tensor, tables: Tensor, lens: Tensor,
) -> Tensor:  # fmt: skip
    """Store the keys and values of S sequences' new tokens, and return attention's result [S, Hq, Dh].

    qkv[S, (Hq + 2 Hkv) · Dh], cos and sin[S, 1, Dh/2], gains[Dh] or None, keys and values[B, P, Hkv, Dh],
    slots[S] of the new tokens, tables[S, W], lens[S], which count the new token, too. A row with slot -1
    stores nothing. A row of length 0 is padding, and its result may be anything.
    """
    S, Hq, Hkv, Dh = len(qkv), config.num_heads, config.num_kv_heads, config.head_dim
    out = torch.empty(S, Hq, Dh, dtype=qkv.dtype, device=qkv.device)
    _attend_rows[(Hkv, S)](
        qkv, cos, sin, *gains, keys, values, slots, tables, lens, out, tables.stride(0), config.norm_eps,
        Dh**-0.5, HQ=Hq, HKV=Hkv, HALF=Dh // 2, P=keys.shape[1], NORM=config.qk_norm,
        ROWS=max(MIN_DOT_SIZE, triton.next_power_of_2(Hq // Hkv)), **TILE,
    )  # fmt: skip
    return out


def llama_blocks(model: Llama) -> list[Block]:
    """The model's blocks with their type, which nn.ModuleList does not declare."""
    return cast(list[Block], list(model.blocks))


def gains_of(attention: Attention) -> Gains:
    """The gains[Dh] of the queries' norm and of the keys' norm; None if the model has no such norm."""
    if attention.q_norm is None or attention.k_norm is None:  # a model has both or none
        return None, None
    return attention.q_norm.weight, attention.k_norm.weight


def qkv_product(attention: Attention, normed: Tensor, out: Tensor | None = None) -> Tensor:
    """normed[S, D] -> queries, keys and values [S, (Hq + 2 Hkv) · Dh], in `out` if it is given."""
    qkv = attention.qkv
    if qkv.bias is None:
        return torch.mm(normed, qkv.weight.t(), out=out)
    return torch.addmm(qkv.bias, normed, qkv.weight.t(), out=out)


@triton.jit
def _norm_and_rotate(heads, gain, cos, sin, mask, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Norm (if NORM) and rotate R heads -> their first and second halves, [R, HALF] each.

    heads[R, 1] are pointers to the heads' first numbers. A head with a False in mask[R, 1] is loaded as 0.
    gain[2 HALF]; cos and sin[HALF].
    """
    pair = tl.arange(0, HALF)
    first = tl.load(heads + pair[None, :], mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
    second = tl.load(heads + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
    if NORM:
        rstd = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first *= rstd * tl.load(gain + pair).to(tl.float32)[None, :]
        second *= rstd * tl.load(gain + HALF + pair).to(tl.float32)[None, :]
    cosines, sines = tl.load(cos + pair)[None, :], tl.load(sin + pair)[None, :]  # [1, HALF] each
    return first * cosines - second * sines, second * cosines + first * sines


@triton.jit
def load_normed_token(
    qkv, cos, sin, q_gain, k_gain, head, eps, dtype: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The new token's queries, key and value at key head `head`, from qkv[(HQ + 2 HKV) · Dh].

    -> both halves of the HQ / HKV queries, [ROWS, HALF] each, both halves of the key, [1, HALF] each, and
    value[Dh], all rounded to `dtype` as if they had been stored. HALF is a power of two (`LlamaRows.fits`).
    So all numbers of tl.arange(0, HALF) lie inside the half, and the kernels need no mask for them.
    """
    DH: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HQ // HKV
    group_row = tl.arange(0, ROWS)  # the first GROUP rows are queries, the other rows are padding
    one_row = tl.arange(0, 1)  # [1]: makes `key` a tensor of one row
    queries = qkv + (head * GROUP + group_row)[:, None] * DH  # [ROWS, 1]
    key = qkv + (HQ + head + one_row)[:, None] * DH  # [1, 1]
    is_query, is_key = (group_row < GROUP)[:, None], tl.full([1, 1], True, tl.int1)
    qa, qb = _norm_and_rotate(queries, q_gain, cos, sin, is_query, eps, HALF, NORM)
    ka, kb = _norm_and_rotate(key, k_gain, cos, sin, is_key, eps, HALF, NORM)
    value = tl.load(qkv + (HQ + HKV + head) * DH + tl.arange(0, DH))  # [DH]
    return qa.to(dtype), qb.to(dtype), ka.to(dtype), kb.to(dtype), value


@triton.jit
def _attend_rows(
    qkv, cos, sin, q_gain, k_gain, keys, values, slots, tables, lens, out, width, eps, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (key head, sequence): out[S, HQ, DH] for the queries that share the key head.

    `width` is W of tables[S, W].
    """
    DH: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HQ // HKV
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_old = tl.load(lens + sequence) - 1  # tokens without the new one
    if num_old < 0:
        return
    # 1. The new token's queries, key and value. The key and the value are stored in their page.
    offset, group_row = tl.arange(0, TOKENS), tl.arange(0, ROWS)
    pair, dim = tl.arange(0, HALF), tl.arange(0, DH)
    tables += sequence * width
    block = tl.load(tables + offset // P, mask=offset < num_old, other=0)  # [TOKENS]
    qkv += sequence * (HQ + 2 * HKV) * DH
    cos += sequence * HALF
    sin += sequence * HALF
    dtype: tl.constexpr = keys.dtype.element_ty
    qa, qb, new_ka, new_kb, new_value = load_normed_token(
        qkv, cos, sin, q_gain, k_gain, head, eps, dtype, HQ, HKV, HALF, NORM, ROWS
    )  # [ROWS, HALF] twice, [1, HALF] twice, [DH]
    slot = tl.load(slots + sequence).to(tl.int64)
    new_offset = (slot * HKV + head) * DH
    tl.store(keys + new_offset + pair[None, :], new_ka, mask=slot >= 0)
    tl.store(keys + new_offset + HALF + pair[None, :], new_kb, mask=slot >= 0)
    tl.store(values + new_offset + dim, new_value, mask=slot >= 0)
    # 2. The running softmax over the new token, and then over the old tokens.
    score = tl.sum(qa.to(tl.float32) * new_ka.to(tl.float32), 1)  # [ROWS], of the new token
    score += tl.sum(qb.to(tl.float32) * new_kb.to(tl.float32), 1)
    maximum = score * scale  # [ROWS]
    total = tl.full([ROWS], 1.0, tl.float32)
    weighted = tl.zeros([ROWS, DH], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, num_old, TOKENS):
        token = start + offset
        valid = (token < num_old)[:, None]  # [TOKENS, 1]
        address = ((block.to(tl.int64) * P + token % P) * HKV + head)[:, None] * DH  # [TOKENS, 1]
        ka = tl.load(keys + address + pair[None, :], mask=valid, other=0.0)  # [TOKENS, HALF]
        kb = tl.load(keys + address + HALF + pair[None, :], mask=valid, other=0.0)  # [TOKENS, HALF]
        v = tl.load(values + address + dim[None, :], mask=valid, other=0.0)  # [TOKENS, DH]
        block = tl.load(tables + (token + TOKENS) // P, mask=token + TOKENS < num_old, other=0)
        scores = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee") * scale  # [ROWS, TOKENS]
        scores = tl.where((token < num_old)[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
    mean = weighted / total[:, None]
    out += (sequence * HQ + head * GROUP + group_row)[:, None] * DH + dim[None, :]
    tl.store(out, mean.to(out.dtype.element_ty), mask=(group_row < GROUP)[:, None])
