"""A decode step of Llama or Qwen3: PyTorch's matrix products, and Triton's kernels between them. Part 20.

Promises the model's own logits up to rounding. The residual sum is in fp32. PyTorch also computes the angles
of a step's rotations. The kernels are:

- `embed_rms_norm`: the embedding and the first norm.
- `add_rms_norm`: the residual sum and the norm.
- `_rotate_and_store`: queries and keys are normed and rotated, and keys and values are stored in their page.
- `paged_attention`, of Part 13.
- `_silu_mul`: silu(gate) · up.

With many rows, unless `stores_first`, `attend_rows` (llama_attend.py) takes the place of `_rotate_and_store`
and `paged_attention`.

The model may be a rank's part of one that several devices share (Extension A). Then the products of `proj`
and `down` are terms of a sum over the ranks, and the caller gives the function that sums them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.kernels.append_attend import MIN_HEAD_DIM
from engine.kernels.llama_attend import (
    Gains,
    attend_rows,
    gains_of,
    llama_blocks,
    prefers_attend_rows,
    qkv_product,
)
from engine.kernels.paged_attention import num_splits, paged_attention
from engine.kernels.plain_layers import has_plain_linears
from engine.layers.replace import linear_names
from engine.models.llama import Attention, Block, LlamaConfig
from engine.models.llama import Model as Llama

COLS = 1024  # numbers of the MLP's inner layer that a program of `_silu_mul` computes
HEADS = 8  # heads of a token that a program of `_rotate_and_store` computes
SumParts = Callable[[Tensor], Tensor]  # writes the sum over the ranks into a rank's term, and returns it


class LlamaRows:
    """The forward pass of S ≤ max_rows rows, one new token each. Its buffers keep their addresses."""

    def __init__(
        self, model: Llama, keys: list[Tensor], values: list[Tensor], max_rows: int,
        stores_first: bool = False, sum_parts: SumParts | None = None,
    ) -> None:  # fmt: skip
        """`model`: a model for which `fits` is true. `keys` and `values`: one tensor [B, P, Hkv, Dh] for each
        layer. `max_rows`: the most rows of a step.

        `stores_first`: whether the keys and values of all rows are stored before any row attends. Must be
        True if a step may have several rows of one sequence, since a row must see the keys of earlier rows.

        `sum_parts`: sums a rank's terms over the ranks, in place; None if the model is whole.
        """
        config = self.config = model.config
        self.stores_first = stores_first
        self.sum_parts = unchanged if sum_parts is None else sum_parts
        device, dtype = model.embed.weight.device, model.embed.weight.dtype
        D, inner, Dh = config.hidden_size, config.intermediate_size, config.head_dim
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.model, self.keys, self.values = model, keys, values
        self.blocks, self.frequencies = llama_blocks(model), model.get_buffer("frequencies")
        self.next_gains, self.head = next_gains_of(model), _head_weight(model)
        self.summed_weights = [summed_weights_of(block) for block in self.blocks]
        self.x = torch.empty(max_rows, D, device=device)  # the residual, in fp32
        self.normed, self.product = empty(max_rows, D), empty(max_rows, D)
        self.qkv = empty(max_rows, (config.num_heads + 2 * config.num_kv_heads) * Dh)
        self.q = empty(max_rows, config.num_heads, Dh)
        self.gate_up, self.inner = empty(max_rows, 2 * inner), empty(max_rows, inner)
        self.logits = empty(max_rows, len(self.head))

    @staticmethod
    def fits(model: nn.Module, is_part: bool = False) -> TypeGuard[Llama]:
        """Whether this class computes the model: a model of llama.py's code without extras of attention, with
        silu, with a head width that is a power of two and at least MIN_HEAD_DIM, without biases but those of
        queries, keys and values, and with linear layers that are not quantized, wrapped or packed.

        `is_part`: the model is a rank's part. Its layers may stand inside `SumOverRanks`, must have no bias,
        and may include no head.
        """
        if not isinstance(model, Llama) or not _config_fits(model.config):
            return False
        if is_part:
            linears = [model.get_submodule(name) for name in linear_names(model)]
            is_plain = all(isinstance(linear, nn.Linear) and linear.bias is None for linear in linears)
            num_linears = 4 * model.config.num_layers + (1 if model.has_head else 0)
            return is_plain and len(linears) == num_linears
        if not has_plain_linears(model, model.config.num_layers):
            return False
        return all(block.attention.proj.bias is None for block in llama_blocks(model))

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """token_ids, positions, slots, lens[S], tables[S, W] -> logits[S, V], or [S, 0] without a head. The
        result is a buffer that the next call overwrites.

        `lens` counts the new token, too. A row with slot -1 stores nothing. A row of length 0 is padding, and
        its logits may be anything.
        """
        model, config, S = self.model, self.config, len(token_ids)
        D, eps = config.hidden_size, config.norm_eps
        shape = {"D": D, "PADDED": triton.next_power_of_2(D), "num_warps": 4}
        x, normed, product = self.x, self.normed[:S], self.product[:S]
        cos, sin = config.rope.angles(positions, self.frequencies, torch.float32)  # [S, 1, Dh/2] each
        first_gain = self.blocks[0].norm1.weight
        embed_rms_norm[(S,)](token_ids, model.embed.weight, x, first_gain, normed, eps, **shape)
        for layer, (block, next_gain) in enumerate(zip(self.blocks, self.next_gains, strict=True)):
            attended = self._attend(
                normed, block.attention, cos, sin, self.keys[layer], self.values[layer], slots, tables, lens
            )  # [S, Hq, Dh]
            proj, down = self.summed_weights[layer]
            torch.mm(attended.view(S, -1), proj.t(), out=product)
            self.sum_parts(product)
            add_rms_norm[(S,)](x, product, block.norm2.weight, normed, eps, **shape)
            gate_up = torch.mm(normed, block.mlp.gate_up.weight.t(), out=self.gate_up[:S])
            inner = silu_mul(gate_up, self.inner[:S])
            torch.mm(inner, down.t(), out=product)
            self.sum_parts(product)
            add_rms_norm[(S,)](x, product, next_gain, normed, eps, **shape)
        return torch.mm(normed, self.head.t(), out=self.logits[:S])

    def _attend(
        self, normed: Tensor, attention: Attention, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor, tables: Tensor, lens: Tensor,
    ) -> Tensor:  # fmt: skip
        """normed[S, D] -> attention's result [S, Hq, Dh]. Stores the new keys and values in their slots."""
        config, S = self.config, len(normed)
        qkv = qkv_product(attention, normed, self.qkv[:S])
        gains = gains_of(attention)
        if prefers_attend_rows(config, S, qkv.device) and not self.stores_first:
            return attend_rows(config, qkv, cos, sin, gains, keys, values, slots, tables, lens)
        q = self.q[:S]
        rotate_and_store(config, qkv, q, keys, values, slots, cos, sin, gains)
        return paged_attention(q, keys, values, tables, lens, num_splits(S, config.num_kv_heads, q.device))


class SummedWeights(NamedTuple):
    """The weights of a block whose products are summed over the ranks, if several ranks share the model."""

    proj: Tensor  # [D, Hq · Dh]
    down: Tensor  # [D, inner]


def summed_weights_of(block: Block) -> SummedWeights:
    """The block's `SummedWeights`, also of layers inside `SumOverRanks` (Extension A)."""
    return SummedWeights(_linear_in(block.attention.proj).weight, _linear_in(block.mlp.down).weight)


def _linear_in(module: nn.Module) -> nn.Linear:
    """The module itself if it is an nn.Linear, or the one inside it."""
    return next(layer for layer in module.modules() if isinstance(layer, nn.Linear))


def _head_weight(model: Llama) -> Tensor:
    """The weight of the head[V, D]; [0, D] if the model has none."""
    return model.head.weight if model.has_head else model.embed.weight[:0]


def _config_fits(config: LlamaConfig) -> bool:
    """Whether the kernels compute a Llama with this config, as `LlamaRows.fits` says."""
    Dh = config.head_dim
    head_fits = Dh >= MIN_HEAD_DIM and Dh == triton.next_power_of_2(Dh)
    is_plain = not config.attention_extras and not config.mlp_bias
    return head_fits and is_plain and config.activation == "silu"


def unchanged(product: Tensor) -> Tensor:
    """The `SumParts` of a model that is whole."""
    return product


def next_gains_of(model: Llama) -> list[Tensor]:
    """The gain[D] of the norm that follows each block: the next block's first norm, and the model's last."""
    return [*(block.norm1.weight for block in llama_blocks(model)[1:]), model.norm.weight]


def rotate_and_store(
    config: LlamaConfig, qkv: Tensor, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor,
    sin: Tensor, gains: Gains,
) -> None:  # fmt: skip
    """Split qkv[S, (Hq + 2 Hkv) · Dh]: queries go to q[S, Hq, Dh], and keys and values to the slots slots[S].

    Queries and keys are normed, if the model has gains, and rotated by cos and sin[S, 1, Dh/2]. `keys` and
    `values` have rows of Hkv · Dh numbers, one for each slot. A row with slot -1 stores no key and value.
    """
    Hq, Hkv = config.num_heads, config.num_kv_heads
    _rotate_and_store[(triton.cdiv(Hq + 2 * Hkv, HEADS), len(qkv))](
        qkv, q, keys, values, slots, cos, sin, *gains, config.norm_eps,
        HQ=Hq, HKV=Hkv, HALF=config.head_dim // 2, NORM=config.qk_norm, HEADS=HEADS, num_warps=2,
    )  # fmt: skip


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """gate_up[S, 2 inner] -> out[S, inner]: silu(gate) · up."""
    S, inner = out.shape
    _silu_mul[(triton.cdiv(inner, COLS), S)](gate_up, out, N=inner, COLS=COLS, num_warps=4)
    return out


@triton.jit
def _store_rms_norm(residual, gain, normed, row, column, eps, D: tl.constexpr):
    """normed[row] = residual / (the root mean square of residual) · gain. residual[PADDED] is 0 beyond D;
    column = 0 to PADDED - 1.
    """
    rstd = tl.rsqrt(tl.sum(residual * residual, 0) / D + eps)
    gains = tl.load(gain + column, mask=column < D, other=0.0).to(tl.float32)
    result = (residual * rstd * gains).to(normed.dtype.element_ty)
    tl.store(normed + row * D + column, result, mask=column < D)


@triton.jit
def embed_rms_norm(token_ids, embed, x, gain, normed, eps, D: tl.constexpr, PADDED: tl.constexpr):
    """x[S, D] = embed[token]; normed = norm(x)."""
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    token = tl.load(token_ids + row).to(tl.int64)
    residual = tl.load(embed + token * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(x + row * D + column, residual, mask=column < D)
    _store_rms_norm(residual, gain, normed, row, column, eps, D)


@triton.jit
def add_rms_norm(x, product, gain, normed, eps, D: tl.constexpr, PADDED: tl.constexpr):
    """x[S, D] += product; normed = norm(x)."""
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    residual = tl.load(x + row * D + column, mask=column < D, other=0.0)
    residual += tl.load(product + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(x + row * D + column, residual, mask=column < D)
    _store_rms_norm(residual, gain, normed, row, column, eps, D)


@triton.jit
def _rotate_and_store(
    qkv, q, keys, values, slots, cos, sin, q_gain, k_gain, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (HEADS heads, row): these heads of the row's qkv[S, (HQ + 2 HKV) · Dh], Dh = 2 HALF.

    Queries and keys are normed (if NORM) and rotated by cos and sin[S, HALF]. A query goes to q[S, HQ, Dh]. A
    key or a value goes to row slots[row] of keys or values, unless the slot is -1.
    """
    head, row = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    is_query, is_value = (head < HQ)[:, None], (head >= HQ + HKV)[:, None]  # [HEADS, 1] each
    valid = (head < HQ + 2 * HKV)[:, None]  # [HEADS, 1]
    # 1. Load both halves of the heads.
    address = qkv + (row * (HQ + 2 * HKV) + head)[:, None] * 2 * HALF + pair  # [HEADS, HALF]
    first = tl.load(address, mask=valid, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(address + HALF, mask=valid, other=0.0).to(tl.float32)  # [HEADS, HALF]
    # 2. Norm the halves to x and y. Rotate queries and keys; values stay as they are.
    x, y = first, second
    if NORM:
        rstd = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        x_gain = tl.where(is_query, tl.load(q_gain + pair), tl.load(k_gain + pair))  # [HEADS, HALF]
        y_gain = tl.where(is_query, tl.load(q_gain + HALF + pair), tl.load(k_gain + HALF + pair))
        x *= rstd * x_gain.to(tl.float32)
        y *= rstd * y_gain.to(tl.float32)
    cosines, sines = tl.load(cos + row * HALF + pair), tl.load(sin + row * HALF + pair)  # [1, HALF] each
    dtype: tl.constexpr = q.dtype.element_ty
    first = tl.where(is_value, first, x * cosines - y * sines).to(dtype)
    second = tl.where(is_value, second, y * cosines + x * sines).to(dtype)
    # 3. Store queries in q, and keys and values in the row's slot.
    out = q + (row * HQ + head)[:, None] * 2 * HALF + pair  # [HEADS, HALF]
    tl.store(out, first, mask=is_query)
    tl.store(out + HALF, second, mask=is_query)
    slot = tl.load(slots + row).to(tl.int64)
    stores_key = (slot >= 0) & valid & ~is_query & ~is_value  # [HEADS, 1]
    key_offset = (slot * HKV + head - HQ)[:, None] * 2 * HALF + pair  # [HEADS, HALF]
    tl.store(keys + key_offset, first, mask=stores_key)
    tl.store(keys + key_offset + HALF, second, mask=stores_key)
    stores_value = (slot >= 0) & valid & is_value  # [HEADS, 1]
    value_offset = key_offset - HKV * 2 * HALF  # a value's head has the number of its key's head + HKV
    tl.store(values + value_offset, first, mask=stores_value)
    tl.store(values + value_offset + HALF, second, mask=stores_value)


@triton.jit
def _silu_mul(gate_up, out, N: tl.constexpr, COLS: tl.constexpr):
    """Program (COLS columns, row): out[S, N] = silu(gate) · up; gate_up[S, 2 N] has gate and then up."""
    row, col = tl.program_id(1), tl.program_id(0) * COLS + tl.arange(0, COLS)
    address = gate_up + row.to(tl.int64) * 2 * N + col
    gate = tl.load(address, mask=col < N, other=0.0).to(tl.float32)
    up = tl.load(address + N, mask=col < N, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row.to(tl.int64) * N + col, product.to(out.dtype.element_ty), mask=col < N)
