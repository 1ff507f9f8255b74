"""A decode step of one sequence of GPT-2 as a chain of few kernels that overlap. Part 13, tuned for one
sequence.

With one row a step reads every weight once and computes little. So the chain saves the time between two
kernels. Beside attention a block has two kinds of kernels: a norm with the linear layer that follows, and a
linear layer with the residual sum. On Hopper each kernel from the third on is launched while the previous
kernel still runs (`pdl.py`), and loads its first weights or old keys meanwhile. (The first kernel,
`_embed`, does not call `release`, so the second starts when it has ended.)

Promises GPT-2's numbers up to rounding. Residuals and sums are in fp32.
"""

from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from engine.kernels.append_attend import MIN_HEAD_DIM, AppendAttend
from engine.kernels.pdl import has_pdl, release, wait
from engine.kernels.plain_layers import gpt2_blocks, has_plain_linears
from engine.kernels.tiles import Tile, num_multiprocessors
from engine.models.config import ModelConfig
from engine.models.gpt2 import Model as GPT2

# Chosen on an H200; on another GPU, others may be faster.
TILES = {
    "qkv": Tile(rows=4, warps=4, resident=4),
    "proj": Tile(rows=4, warps=2, resident=None),
    "up": Tile(rows=2, warps=4, resident=6),
    "down": Tile(rows=2, warps=8, resident=4),
    "head": Tile(rows=4, warps=4, resident=8),
}


@triton.jit
def gelu(x):
    """GPT-2's gelu: x · (1 + tanh(u)) / 2, where u = √(2/π) · (x + 0.044715 · x³).

    tanh(u) is computed as 1 - 2 / (exp(2u) + 1), which does not become NaN where exp(2u) is infinite.
    """
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # the first number is √(2/π)
    return x * (1 - 1 / (tl.exp(2 * u) + 1))


@triton.jit
def load_rows(weight, row, column, N: tl.constexpr, K: tl.constexpr):
    """Load the rows row[R] and the columns column[PADDED] of weight[N, K] -> [R, PADDED], 0 beyond N and K.

    `row` must be int64 if the matrix may have more than 2**31 numbers. A step reads each weight once, so the
    caches need not keep the numbers ("evict_first").
    """
    inside = (column < K)[None, :] & (row < N)[:, None]
    address = weight + row[:, None] * K + column[None, :]
    return tl.load(address, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _embed(token_ids, positions, embed, embed_position, x, D: tl.constexpr, PADDED: tl.constexpr):
    """x[D] = the token's row of `embed` + the position's row of `embed_position`."""
    column = tl.arange(0, PADDED)
    inside = column < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    token_row = tl.load(embed + token * D + column, mask=inside, other=0.0).to(tl.float32)  # [PADDED]
    position_row = tl.load(embed_position + position * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + column, token_row + position_row, mask=inside)


@triton.jit
def _norm_linear(
    x, weight, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · weight[N, K]ᵀ + c, or gelu of this sum (GELU). The norm has no separate pass.

    The norm has gain g[K] and bias b[K]. The linear layer has the weight W and bias c[N]. The mean of x is m,
    and its standard deviation is s. Norm and layer together compute

        W·(g·(x - m)/s + b) + c = (W·(g·x) - m·(W·g))/s + (W·b + c).

    W·g (`weight_gain`[N]) and W·b + c (`weight_bias`[N]) do not depend on x, and are computed once, at load.
    """
    # 1. The weights of this program's first ROWS rows, which no kernel of the step writes.
    column = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = load_rows(weight, row, column, N, K)  # [ROWS, PADDED]
    weight_gains = tl.load(weight_gain + row, mask=row < N, other=0.0)  # [ROWS]
    weight_biases = tl.load(weight_bias + row, mask=row < N, other=0.0)  # [ROWS]
    gains = tl.load(gain + column, mask=column < K, other=0.0)  # [PADDED]
    release(PDL)
    # 2. The residual[PADDED], its mean, and rstd: 1 / its standard deviation.
    wait(PDL)
    residual = tl.load(x + column, mask=column < K, other=0.0)  # [PADDED]
    mean = tl.sum(residual, 0) / K
    rstd = tl.rsqrt(tl.sum(residual * residual, 0) / K - mean * mean + eps)
    scaled = residual * gains.to(tl.float32)  # [PADDED]: g·x
    # 3. ROWS rows at a time. The weights of the next rows, if there are any, are loaded while these are
    #    computed.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_tile = load_rows(weight, next_row, column, N, K)
            next_weight_gains = tl.load(weight_gain + next_row, mask=next_row < N, other=0.0)
            next_weight_biases = tl.load(weight_bias + next_row, mask=next_row < N, other=0.0)
        product = tl.sum(tile.to(tl.float32) * scaled[None, :], 1)
        product = (product - mean * weight_gains) * rstd + weight_biases
        if GELU:
            product = gelu(product)
        tl.store(out + row, product.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            tile, weight_gains, weight_biases = next_tile, next_weight_gains, next_weight_biases


@triton.jit
def _linear_add(
    a, weight, bias, x,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · weight[N, K]ᵀ + bias."""
    column = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = load_rows(weight, row, column, N, K)
    biases = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    residual = tl.load(x + row, mask=row < N, other=0.0)  # [ROWS]
    vector = tl.load(a + column, mask=column < K, other=0.0).to(tl.float32)  # [PADDED]
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_tile = load_rows(weight, next_row, column, N, K)
            next_biases = tl.load(bias + next_row, mask=next_row < N, other=0.0).to(tl.float32)
            next_residual = tl.load(x + next_row, mask=next_row < N, other=0.0)
        new_residual = residual + tl.sum(tile.to(tl.float32) * vector[None, :], 1) + biases
        tl.store(x + row, new_residual, mask=row < N)
        if PROGRAMS * ROWS < N:
            tile, biases, residual = next_tile, next_biases, next_residual


class Operand(NamedTuple):
    """A linear layer's arguments for its kernel."""

    tensors: tuple[Tensor, ...]  # in the order of the kernel's parameters
    constants: dict[str, int]  # compile-time constants of the kernel: N, K and others


class BlockOperands(NamedTuple):
    """The linear layers of a block, with the norms before `qkv` and `up`, as arguments for the kernels."""

    qkv: Operand
    proj: Operand
    up: Operand
    down: Operand


class Operands(NamedTuple):
    """All weights of a GPT-2 as arguments for the chain's kernels."""

    embeddings: tuple[Tensor, ...]  # token and position tables, in the order of the kernel's parameters
    blocks: list[BlockOperands]
    head: Operand


class Kernels(NamedTuple):
    """The kernels of the chain besides attention."""

    embed: JITFunction
    norm_linear: JITFunction
    linear_add: JITFunction


class SingleRow:
    """GPT-2's forward pass of one sequence's next token. Its buffers keep their addresses."""

    kernels = Kernels(_embed, _norm_linear, _linear_add)

    def __init__(
        self, model: GPT2, keys: list[Tensor], values: list[Tensor], operands: Operands | None = None
    ) -> None:
        """`model`: a model for which `fits` is true. `keys` and `values`: one tensor [B, P, H, Dh] for each
        layer.

        `operands`: the arguments for the kernels of a subclass (Part 17); None: made from the model's
        weights.
        """
        config = self.config = model.config
        device, dtype = model.norm.weight.device, model.norm.weight.dtype
        D = config.hidden_size
        self.tiles = TILES
        self.keys, self.values = keys, values
        self.pdl = has_pdl(device)
        self.multiprocessors = num_multiprocessors(device)
        self.operands = _operands_of(model) if operands is None else operands
        self.attend = AppendAttend(config.num_heads, config.head_dim, device)
        self.x = torch.empty(D, device=device, dtype=torch.float32)
        self.qkv = torch.empty(1, 3 * D, device=device, dtype=dtype)
        self.attended = torch.empty(D, device=device, dtype=dtype)
        self.inner = torch.empty(config.intermediate_size, device=device, dtype=dtype)
        self.logits = torch.empty(1, config.vocab_size, device=device, dtype=torch.float32)

    @staticmethod
    def fits(model: nn.Module) -> TypeGuard[GPT2]:
        """Whether these kernels compute the model: a GPT-2 with a config that `supports` accepts, and with
        linear layers that are not quantized, wrapped or packed.
        """
        return (
            isinstance(model, GPT2)
            and SingleRow.supports(model.config)
            and has_plain_linears(model, model.config.num_layers)
        )

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels compute a GPT-2 with this config: the activation is gelu's tanh form, and the
        width of a head is a power of two, at least MIN_HEAD_DIM.
        """
        Dh = config.head_dim
        head_fits = Dh >= MIN_HEAD_DIM and Dh == triton.next_power_of_2(Dh)
        return head_fits and config.activation in ("gelu_new", "gelu_pytorch_tanh")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """token_ids, positions, slots, lens[1], tables[1, W] -> logits[1, V] in fp32, in a buffer that the
        next call overwrites.

        `lens` counts the new token, too. A length of 0 is a padding row, whose logits may be anything.
        """
        self.launch_embed(token_ids, positions)
        for layer, block in enumerate(self.operands.blocks):
            self.launch_norm_linear("qkv", block.qkv, self.qkv)
            # None for the bias: the qkv layer's kernel has added it.
            self.attend(
                self.qkv, None, self.keys[layer], self.values[layer], slots, tables, lens, self.attended,
                pdl=self.pdl,
            )  # fmt: skip
            self.launch_linear_add("proj", self.attended, block.proj)
            self.launch_norm_linear("up", block.up, self.inner, gelu=True)
            self.launch_linear_add("down", self.inner, block.down)
        self.launch_norm_linear("head", self.operands.head, self.logits)
        return self.logits

    def launch_embed(self, token_ids: Tensor, positions: Tensor) -> None:
        """Write the embedding of token_ids[1] at positions[1] to the residual x[D]."""
        D = self.config.hidden_size
        self.kernels.embed[(1,)](
            token_ids, positions, *self.operands.embeddings, self.x,
            D=D, PADDED=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip

    def launch_norm_linear(self, name: str, operand: Operand, out: Tensor, gelu: bool = False) -> None:
        """out[N] = the layer's product of the normed residual x[K]; with `gelu`, gelu of this product.

        `name`: the layer's key in `tiles`.
        """
        tile, N = self.tiles[name], operand.constants["N"]
        self.kernels.norm_linear[(tile.num_programs(N, self.multiprocessors),)](
            self.x, *operand.tensors, out, self.config.norm_eps, **operand.constants, GELU=gelu,
            **tile.launch_options(N, self.multiprocessors, self.pdl),
        )  # fmt: skip

    def launch_linear_add(self, name: str, a: Tensor, operand: Operand) -> None:
        """The residual x[N] += the layer's product of a[K]. `name`: the layer's key in `tiles`."""
        tile, N = self.tiles[name], operand.constants["N"]
        self.kernels.linear_add[(tile.num_programs(N, self.multiprocessors),)](
            a, *operand.tensors, self.x, **operand.constants,
            **tile.launch_options(N, self.multiprocessors, self.pdl),
        )  # fmt: skip


def _operands_of(model: GPT2) -> Operands:
    """The model's weights as arguments for `_embed`, `_norm_linear` and `_linear_add`."""
    blocks = [
        BlockOperands(
            qkv=_norm_linear_operand(block.norm1, block.attention.qkv),
            proj=_linear_operand(block.attention.proj),
            up=_norm_linear_operand(block.norm2, block.mlp.up),
            down=_linear_operand(block.mlp.down),
        )
        for block in gpt2_blocks(model)
    ]
    embeddings = model.embed.weight, model.embed_position.weight
    return Operands(embeddings, blocks, _norm_linear_operand(model.norm, model.head))


def _norm_linear_operand(norm: nn.LayerNorm, linear: nn.Linear) -> Operand:
    """The weights of a norm and a linear layer for `_norm_linear`: W[N, K], g[K], (W·g)[N], (W·b + c)[N]."""
    weight = linear.weight.float()
    weight_gain = weight @ norm.weight.float()  # [N]
    weight_bias = weight @ norm.bias.float()  # [N]
    if linear.bias is not None:
        weight_bias = weight_bias + linear.bias.float()
    return Operand((linear.weight, norm.weight, weight_gain, weight_bias), _constants(linear))


def _linear_operand(linear: nn.Linear) -> Operand:
    """The weights of a linear layer for `_linear_add`: W[N, K] and its bias c[N]."""
    return Operand((linear.weight, linear.bias), _constants(linear))


def _constants(linear: nn.Linear) -> dict[str, int]:
    """The constants N, K and PADDED of `_norm_linear` and `_linear_add`."""
    N, K = linear.weight.shape
    return {"N": N, "K": K, "PADDED": triton.next_power_of_2(K)}
