"""A decode step's attention of Llama or Qwen3 in one kernel: a token's queries and key are normed and
rotated, key and value go to their page, and the queries attend. Part 20: what `append_attend.py` is for
GPT-2.

Promises what `rotate_and_store` and `paged_attention.py` give, where each row is another sequence's: a row
does not see what others store in the same step. The new token's numbers stay in registers; where the next
tile of old tokens lies is read while this one is computed.
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paged_attention import MIN_DOT_ROWS
from engine.kernels.running_softmax import add_tile
from engine.kernels.single_row import num_multiprocessors
from engine.models.llama import Attention, Block, LlamaConfig
from engine.models.llama import Model as Llama

MIN_HEAD_DIM = 32  # half a head is the inner dimension of a product on tensor cores, at least 16
# TOKENS: old tokens that a program reads at a time. Of 48 tiles that were tried, the fastest for unlike
# lengths.
TILE = {"TOKENS": 64, "num_warps": 4, "num_stages": 3}
PROGRAMS_PER_MULTIPROCESSOR = 2  # with fewer, splitting each sequence is faster (measured on an H200)

Gains = tuple[Tensor | None, Tensor | None]  # of the norms of queries and keys, [Dh] each


def attend_rows_fits(config: LlamaConfig, rows: int, device: torch.device) -> bool:
    """Whether this kernel computes a model of these settings, and is the faster way for this many rows."""
    min_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    return config.head_dim >= MIN_HEAD_DIM and rows * config.num_kv_heads >= min_programs


def attend_rows(
    config: LlamaConfig, qkv: Tensor, cos: Tensor, sin: Tensor, gains: Gains, keys: Tensor,
    values: Tensor, slots: Tensor, tables: Tensor, lens: Tensor,
) -> Tensor:  # fmt: skip
    """qkv[S, (Hq + 2 Hkv) · Dh], cos and sin[S, 1, Dh/2], norms' gains[Dh] or None, keys and values[B, P,
    Hkv, Dh], slots[S], tables[S, W], lens[S] with the new token -> [S, Hq, Dh]. A slot of -1 or a length of
    0: a padding row.
    """
    S, Hq, Hkv, Dh = len(qkv), config.num_heads, config.num_kv_heads, config.head_dim
    out = torch.empty(S, Hq, Dh, dtype=qkv.dtype, device=qkv.device)
    _attend_rows[(Hkv, S)](
        qkv, cos, sin, *gains, keys, values, slots, tables, lens, out, tables.stride(0), config.norm_eps,
        Dh**-0.5, HQ=Hq, HKV=Hkv, HALF=Dh // 2, P=keys.shape[1], NORM=config.qk_norm,
        ROWS=max(MIN_DOT_ROWS, triton.next_power_of_2(Hq // Hkv)), **TILE,
    )  # fmt: skip
    return out


def blocks_of(model: Llama) -> list[Block]:
    """The model's blocks, with their type: nn.ModuleList does not say what is in it."""
    return cast(list[Block], list(model.blocks))


def gains_of(attention: Attention) -> Gains:
    """None where queries and keys are not normed."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return (None if q_norm is None else q_norm.weight), (None if k_norm is None else k_norm.weight)


@triton.jit
def _norm_and_rotate(heads, gain, cos, sin, mask, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of each head that begins at heads[R, 1], [R, HALF] each: normed (NORM), then rotated by
    cos and sin[HALF]. 0 where not mask[R, 1].
    """
    i = tl.arange(0, HALF)
    a = tl.load(heads + i[None, :], mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
    b = tl.load(heads + HALF + i[None, :], mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
    if NORM:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a *= rstd * tl.load(gain + i).to(tl.float32)[None, :]
        b *= rstd * tl.load(gain + HALF + i).to(tl.float32)[None, :]
    c, s = tl.load(cos + i)[None, :], tl.load(sin + i)[None, :]  # [1, HALF]
    return a * c - b * s, b * c + a * s


@triton.jit
def load_new_token(
    qkv, cos, sin, q_gain, k_gain, head, eps, dtype: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The new token's queries, key and value at key head `head`, from qkv[(HQ + 2 HKV) · Dh], rounded as if
    they had been stored: both halves of its HQ / HKV queries, [ROWS, HALF] each, both halves of its key,
    [1, HALF] each, and its value[Dh]. HALF is a power of two (`LlamaRows.fits`), so no lane of
    tl.arange(0, HALF) lies outside the half, here and below.
    """
    DH: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HQ // HKV
    g = tl.arange(0, ROWS)  # of the queries, the first GROUP are real
    one_row = tl.arange(0, 1)  # [1]: the key has its shape from it
    queries = qkv + (head * GROUP + g)[:, None] * DH  # [ROWS, 1]
    key = qkv + (HQ + head + one_row)[:, None] * DH  # [1, 1]
    is_query, is_key = (g < GROUP)[:, None], tl.full([1, 1], True, tl.int1)
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
    """Program (key head, sequence): out[S, HQ, DH] of the queries that share the key head. Of a query or a
    key, a and b are its first and second half, [HALF] each: number i of a is rotated with number i of b.
    """
    DH: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HQ // HKV
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_old = tl.load(lens + sequence) - 1  # tokens without the new one
    if num_old < 0:
        return
    # 1. The new token's queries, key and value; the last two go to their page.
    t, i, d, g = tl.arange(0, TOKENS), tl.arange(0, HALF), tl.arange(0, DH), tl.arange(0, ROWS)
    tables += sequence * width
    block = tl.load(tables + t // P, mask=t < num_old, other=0)  # [TOKENS]
    qkv += sequence * (HQ + 2 * HKV) * DH
    cos += sequence * HALF
    sin += sequence * HALF
    dtype: tl.constexpr = keys.dtype.element_ty
    qa, qb, new_ka, new_kb, new_value = load_new_token(
        qkv, cos, sin, q_gain, k_gain, head, eps, dtype, HQ, HKV, HALF, NORM, ROWS
    )  # [ROWS, HALF] twice, [1, HALF] twice, [DH]
    slot = tl.load(slots + sequence).to(tl.int64)
    new_offset = (slot * HKV + head) * DH
    tl.store(keys + new_offset + i[None, :], new_ka, mask=slot >= 0)
    tl.store(keys + new_offset + HALF + i[None, :], new_kb, mask=slot >= 0)
    tl.store(values + new_offset + d, new_value, mask=slot >= 0)
    # 2. The running softmax begins with the new token, and goes on with the old ones.
    score = tl.sum(qa.to(tl.float32) * new_ka.to(tl.float32), 1)  # [ROWS]: of the new token
    score += tl.sum(qb.to(tl.float32) * new_kb.to(tl.float32), 1)
    maximum = score * scale  # [ROWS]
    total = tl.full([ROWS], 1.0, tl.float32)
    weighted = tl.zeros([ROWS, DH], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, num_old, TOKENS):
        token = start + t
        valid = (token < num_old)[:, None]  # [TOKENS, 1]
        address = ((block.to(tl.int64) * P + token % P) * HKV + head)[:, None] * DH  # [TOKENS, 1]
        ka = tl.load(keys + address + i[None, :], mask=valid, other=0.0)  # [TOKENS, HALF]
        kb = tl.load(keys + address + HALF + i[None, :], mask=valid, other=0.0)  # [TOKENS, HALF]
        v = tl.load(values + address + d[None, :], mask=valid, other=0.0)  # [TOKENS, DH]
        block = tl.load(tables + (token + TOKENS) // P, mask=token + TOKENS < num_old, other=0)
        scores = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee") * scale  # [ROWS, TOKENS]
        scores = tl.where((token < num_old)[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
    mean = weighted / total[:, None]
    out += (sequence * HQ + head * GROUP + g)[:, None] * DH + d[None, :]
    tl.store(out, mean.to(out.dtype.element_ty), mask=(g < GROUP)[:, None])
