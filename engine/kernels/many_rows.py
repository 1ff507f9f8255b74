"""A decode step of many sequences of GPT-2: most matrix products are PyTorch's, and the kernels between
them are Triton's. Part 13, tuned for a batch.

Promises GPT-2's numbers up to rounding. The kernel that reads a product adds the bias, since this kernel has
the product's numbers in registers; only `up` adds its own bias, with the gelu. The residual sum, the bias and
the norm are one kernel.

Two products of a block, `proj` and `down`, have few columns, and would leave most of the GPU idle with few
rows. In steps of up to SPLIT_ROWS rows, a Triton kernel computes them in SPLITS parts of the inner dimension
(split-K), and the next kernel sums the parts. For this the inner dimension must be a multiple of SPLITS ·
INNER, and the number of columns a multiple of COLS, as in GPT-2 large and XL.

If the number of the output layer's rows is no multiple of HEAD_ROWS, its weights are copied and padded.
GPT-2 has 50,257 rows, and with this odd number the product takes several times as long.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.kernels.append_attend import AppendAttend, AttendRows
from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.pdl import has_pdl, release, wait
from engine.kernels.plain_layers import gpt2_blocks
from engine.models.gpt2 import Model as GPT2

SPLIT_ROWS = 128  # the most rows of a step with split products; with more rows PyTorch's products are faster
SPLITS = 5  # parts of the inner dimension; divides GPT-2 XL's 1,600 and 6,400 into whole tiles of INNER
INNER = 64  # numbers of the inner dimension that a program reads at a time
FEW_ROWS = 64  # the most rows of a step with FEW_ROWS_TILE, and with PDL for attention
HEAD_ROWS = 128  # the padded output layer has a multiple of so many rows
# COLS: columns of the product that a program of `_split_linear` computes.
FEW_ROWS_TILE = {"COLS": 32, "num_warps": 4}
MANY_ROWS_TILE = {"COLS": 64, "num_warps": 8}


class ManyRows:
    """GPT-2's forward pass of S ≤ max_rows rows, the next token of a sequence each. Its buffers keep their
    addresses.
    """

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor], max_rows: int) -> None:
        """`model`: a model for which `SingleRow.fits` is true. `keys` and `values`: one tensor [B, P, H, Dh]
        for each layer. `max_rows`: the most rows of a step.
        """
        config = self.config = model.config
        device, dtype = model.embed.weight.device, model.embed.weight.dtype
        D, V = config.hidden_size, config.vocab_size
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.model, self.keys, self.values = model, keys, values
        self.blocks = gpt2_blocks(model)
        self.next_norms = next_norms_of(model)
        self.attend: AttendRows = AppendAttend(config.num_heads, config.head_dim, device)
        self.pdl = has_pdl(device)
        head = model.head.weight
        missing_rows = triton.cdiv(V, HEAD_ROWS) * HEAD_ROWS - V
        self.head = torch.cat([head, head.new_zeros(missing_rows, D)]) if missing_rows else head
        self.x = torch.empty(max_rows, D, device=device)  # the residual, in fp32
        self.normed = empty(max_rows, D)
        self.attended = empty(max_rows, D)
        self.product = empty(max_rows, D)
        self.qkv = empty(max_rows, 3 * D)
        self.parts = torch.empty(SPLITS * min(max_rows, SPLIT_ROWS) * D, device=device)
        self.logits = empty(max_rows, len(self.head))

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """token_ids, positions, slots, lens[S], tables[S, W] -> logits[S, at least V], in a buffer that the
        next call overwrites.

        `lens` counts the new token, too. A row with slot -1 stores nothing. A row of length 0 is padding, and
        its logits may be anything. Columns of the logits from V on are not tokens.
        """
        model, S = self.model, len(token_ids)
        D = self.config.hidden_size
        x, normed, attended, qkv = self.x[:S], self.normed[:S], self.attended[:S], self.qkv[:S]
        pdl = self.pdl and S <= SPLIT_ROWS
        norm_options = {
            "D": D, "PADDED": triton.next_power_of_2(D), "PDL": pdl, "num_warps": 8, "launch_pdl": pdl,
        }  # fmt: skip
        first_norm, eps = self.blocks[0].norm1, self.config.norm_eps
        embed_norm[(S,)](
            token_ids, positions, model.embed.weight, model.embed_position.weight, x,
            first_norm.weight, first_norm.bias, normed, eps, **norm_options,
        )  # fmt: skip
        for layer, (block, next_norm) in enumerate(zip(self.blocks, self.next_norms, strict=True)):
            torch.mm(normed, block.attention.qkv.weight.t(), out=qkv)
            self.attend(
                qkv, block.attention.qkv.bias, self.keys[layer], self.values[layer], slots, tables, lens,
                attended, pdl=pdl and S <= FEW_ROWS,
            )  # fmt: skip
            self._linear_add_norm(attended, block.attention.proj, block.norm2, pdl, norm_options)
            inner = linear_gelu(normed, block.mlp.up)
            self._linear_add_norm(inner, block.mlp.down, next_norm, pdl, norm_options)
        return torch.mm(normed, self.head.t(), out=self.logits[:S])

    def _linear_add_norm(
        self, a: Tensor, linear: nn.Linear, norm: nn.LayerNorm, pdl: bool, norm_options: dict[str, Any]
    ) -> None:
        """self.x[S, D] += linear(a[S, in]), and self.normed = norm(x). `pdl`: launch with PDL (`pdl.py`).
        `norm_options`: the constants and launch options of `add_norm`.
        """
        S, D = len(a), self.config.hidden_size
        tile = FEW_ROWS_TILE if S <= FEW_ROWS else MANY_ROWS_TILE
        if S <= SPLIT_ROWS and linear.in_features % (SPLITS * INNER) == 0 and D % tile["COLS"] == 0:
            product, splits = self.parts, SPLITS
            _split_linear[(D // tile["COLS"], SPLITS)](
                a, linear.weight, product, S, N=D, K=linear.in_features,
                ROWS=max(MIN_DOT_SIZE, triton.next_power_of_2(S)), **tile, INNER=INNER, SPLITS=SPLITS,
                PDL=pdl, num_stages=4, launch_pdl=pdl,
            )  # fmt: skip
        else:
            product, splits = torch.mm(a, linear.weight.t(), out=self.product[:S]), 1
        add_norm[(S,)](
            self.x, product, linear.bias, norm.weight, norm.bias, self.normed, self.config.norm_eps, S * D,
            SPLITS=splits, **norm_options,
        )  # fmt: skip


def next_norms_of(model: GPT2) -> list[nn.LayerNorm]:
    """The norm that follows each block: the next block's first norm, and the model's last norm."""
    return [*(block.norm1 for block in gpt2_blocks(model)[1:]), model.norm]


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(linear(x)): x[S, in] -> [S, out]. GPT-2's gelu is the tanh form. PyTorch's product with this gelu
    is one call on a GPU only.
    """
    if x.is_cuda:
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, linear.weight, linear.bias), approximate="tanh")


@triton.jit
def _norm(x, gains, biases, inside, eps, D: tl.constexpr):
    """LayerNorm of x[PADDED] in fp32, with gains and biases[PADDED]. x must be 0 beyond D."""
    mean = tl.sum(x, 0) / D
    centered = tl.where(inside, x - mean, 0.0)  # [PADDED]
    rstd = tl.rsqrt(tl.sum(centered * centered, 0) / D + eps)
    return centered * rstd * gains + biases


@triton.jit
def _load_row(weight, column, inside):
    """weight[column] in fp32, or 0 where `inside` is False; column and inside are [PADDED]."""
    return tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def embed_norm(
    token_ids, positions, embed, embed_position, x, gain, bias, normed, eps,
    D: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[S, D] = embed[token] + embed_position[position]; normed = norm(x)."""
    release(PDL)
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    inside = column < D
    gains, biases = _load_row(gain, column, inside), _load_row(bias, column, inside)
    wait(PDL)
    token, position = tl.load(token_ids + row).to(tl.int64), tl.load(positions + row).to(tl.int64)
    token_row = _load_row(embed + token * D, column, inside)
    residual = token_row + _load_row(embed_position + position * D, column, inside)
    tl.store(x + row * D + column, residual, mask=inside)
    result = _norm(residual, gains, biases, inside, eps, D)
    tl.store(normed + row * D + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_norm(
    x, product, linear_bias, gain, bias, normed, eps, part_stride,
    SPLITS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[S, D] += linear_bias[D] + the sum of product[SPLITS, S, D] over the splits; normed[S, D] = norm(x).

    Split s of the product begins s · `part_stride` numbers after the first. With PDL the gain and the two
    biases, which no kernel of the step writes, are loaded before the product is done.
    """
    release(PDL)
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    inside = column < D
    gains, biases = _load_row(gain, column, inside), _load_row(bias, column, inside)
    residual = _load_row(linear_bias, column, inside)
    wait(PDL)
    residual += _load_row(x + row * D, column, inside)
    for split in tl.static_range(SPLITS):
        residual += _load_row(product + split * part_stride + row * D, column, inside)
    tl.store(x + row * D + column, residual, mask=inside)
    result = _norm(residual, gains, biases, inside, eps, D)
    tl.store(normed + row * D + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _split_linear(
    a, weight, parts, S,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (COLS columns, split): parts[split, S, N] = a[S, share] · weight[N, share]ᵀ, in fp32, where
    `share` is the split's K / SPLITS numbers of the inner dimension K.
    """
    release(PDL)
    wait(PDL)
    row, col = tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    inner = tl.program_id(1) * (K // SPLITS) + tl.arange(0, INNER)
    a += row[:, None] * K + inner[None, :]
    weight += col[None, :] * K + inner[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K // SPLITS, INNER):
        a_tile = tl.load(a + start, mask=(row < S)[:, None], other=0.0)  # [ROWS, INNER]
        weight_tile = tl.load(weight + start)  # [INNER, COLS]
        total = tl.dot(a_tile, weight_tile, total, input_precision="ieee")
    out = parts + (tl.program_id(1) * S + row)[:, None] * N + col[None, :]
    tl.store(out, total, mask=(row < S)[:, None])
