"""A decode step of one sequence as a chain of few kernels, each waiting as little as it can for the last.
Part 13: what tuning adds for a batch of one.

With one row, a step reads every weight once and computes next to nothing, so the gaps between kernels are
what is left to save. Promises GPT-2's numbers up to rounding. Two kinds of kernel beside attention: a norm
with the linear layer behind it, and a linear layer with the residual sum. On Hopper each is launched before
its predecessor has ended (`pdl.py`): its first weights, and all it needs that no predecessor writes, are on
their way when `wait` returns. Residuals and sums are in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels.append_attend import MIN_HEAD_DIM, AppendAttend
from engine.kernels.pdl import has_pdl, release, wait
from engine.layers.replace import linear_names


class Tile(NamedTuple):
    """How a matrix's rows are dealt out: `rows` at a time to programs of `warps` warps, of which each
    multiprocessor has up to `resident` that walk over the matrix; None: a program for each tile.
    """

    rows: int
    warps: int
    resident: int | None
    registers: int | None = None  # of a thread, at most; None: as the compiler likes


TILES = {
    "qkv": Tile(4, 4, 4),
    "proj": Tile(4, 2, None),
    "up": Tile(2, 4, 6),
    "down": Tile(2, 8, 4),
    "head": Tile(4, 4, 8),
}


@triton.jit
def _gelu(x):
    """GPT-2's: tanh as 1 - 2 / (exp(2u) + 1), which neither overflows nor loses small numbers' sign."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1 - 1 / (tl.exp(2 * u) + 1))


@triton.jit
def _embed(token_ids, positions, embed, embed_position, x, D: tl.constexpr, PADDED: tl.constexpr):
    i = tl.arange(0, PADDED)
    inside = i < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    word = tl.load(embed + token * D + i, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(embed_position + position * D + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + i, word + place, mask=inside)


@triton.jit
def _norm_linear(
    x, weight, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · weight[N, K]ᵀ + bias, without a pass for the norm:
    W·(g·(x - m)/s + b) + c = (W·(g·x) - m·(W·g))/s + (W·b + c), where W·g and W·b + c are known at load.
    """
    # 1. What my first rows need, before anything that depends on the step.
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (k < K)[None, :]
    w = tl.load(
        weight + row[:, None] * K + k[None, :],
        mask=inside & (row < N)[:, None],
        other=0.0,
        eviction_policy="evict_first",
    )
    wg = tl.load(weight_gain + row, mask=row < N, other=0.0)
    wb = tl.load(weight_bias + row, mask=row < N, other=0.0)
    g = tl.load(gain + k, mask=k < K, other=0.0)
    release(PDL)
    # 2. The residual, and the norm's two numbers.
    wait(PDL)
    a = tl.load(x + k, mask=k < K, other=0.0)
    mean = tl.sum(a, 0) / K
    rstd = tl.rsqrt(tl.sum(a * a, 0) / K - mean * mean + eps)
    a = a * g.to(tl.float32)
    # 3. Row by row, what the next rows need on its way.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            ahead = tl.load(
                weight + later[:, None] * K + k[None, :],
                mask=inside & (later < N)[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            next_wg = tl.load(weight_gain + later, mask=later < N, other=0.0)
            next_wb = tl.load(weight_bias + later, mask=later < N, other=0.0)
        y = tl.sum(w.to(tl.float32) * a[None, :], 1)
        y = (y - mean * wg) * rstd + wb
        if GELU:
            y = _gelu(y)
        tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            w, wg, wb = ahead, next_wg, next_wb


@triton.jit
def _linear_add(
    a, weight, bias, x,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · weight[N, K]ᵀ + bias."""
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (k < K)[None, :]
    w = tl.load(
        weight + row[:, None] * K + k[None, :],
        mask=inside & (row < N)[:, None],
        other=0.0,
        eviction_policy="evict_first",
    )
    b = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    before = tl.load(x + row, mask=row < N, other=0.0)
    vector = tl.load(a + k, mask=k < K, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            ahead = tl.load(
                weight + later[:, None] * K + k[None, :],
                mask=inside & (later < N)[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            next_b = tl.load(bias + later, mask=later < N, other=0.0).to(tl.float32)
            next_before = tl.load(x + later, mask=later < N, other=0.0)
        y = before + tl.sum(w.to(tl.float32) * vector[None, :], 1) + b
        tl.store(x + row, y, mask=row < N)
        if PROGRAMS * ROWS < N:
            w, b, before = ahead, next_b, next_before


class SingleRow:
    """GPT-2's forward pass of one sequence's next token, over buffers whose addresses never change."""

    def __init__(self, model: nn.Module, keys: list[Tensor], values: list[Tensor]) -> None:
        """keys and values by layer: [B, P, H, Dh]."""
        config = self.config = model.config
        device, dtype = model.norm.weight.device, model.norm.weight.dtype
        D = config.hidden_size
        self.tiles = TILES
        self.model, self.keys, self.values = model, keys, values
        self.pdl = has_pdl(device)
        self.multiprocessors = 1  # the interpreter runs its programs one after the other
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

        self.layers = [
            (
                self._fold(block.norm1, block.attention.qkv), block.attention.proj,
                self._fold(block.norm2, block.mlp.up), block.mlp.down,
            )
            for block in model.blocks
        ]  # fmt: skip
        self.head = self._fold(model.norm, model.head)
        self.attend = AppendAttend(config.num_heads, config.head_dim, device)
        self.x = torch.empty(D, device=device)
        self.qkv = torch.empty(1, 3 * D, device=device, dtype=dtype)
        self.attended = torch.empty(D, device=device, dtype=dtype)
        self.inner = torch.empty(config.intermediate_size, device=device, dtype=dtype)
        self.logits = torch.empty(1, config.vocab_size, device=device)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether this is a model whose arithmetic is written down here: GPT-2, with linear layers as they
        were loaded.
        """
        linears = [model.get_submodule(name) for name in linear_names(model)]
        return (
            SingleRow.knows(model.config)
            and len(linears) == 4 * model.config.num_layers + 1
            and all(isinstance(linear, nn.Linear) for linear in linears)
        )

    @staticmethod
    def knows(config: ModelConfig) -> bool:
        """Whether the kernels compute what such a model does."""
        return (
            config.model_type == "gpt2"
            and config.activation in ("gelu_new", "gelu_pytorch_tanh")
            and config.head_dim == triton.next_power_of_2(config.head_dim) >= MIN_HEAD_DIM
        )

    def _fold(self, norm: nn.Module, linear: nn.Module) -> tuple:
        """A layer behind a norm, with what no step changes: W·g, and W·b + c."""
        weight, bias = linear.weight.float(), linear.bias
        shift = weight @ norm.bias.float()
        shift = shift if bias is None else shift + bias.float()
        return linear.weight, norm.weight, weight @ norm.weight.float(), shift

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """Each [1], tables[1, W] -> logits[1, V]."""
        self._embed(token_ids, positions)
        for layer, (qkv, proj, up, down) in enumerate(self.layers):
            self._norm_linear("qkv", qkv, self.qkv)
            self.attend(
                self.qkv, None, self.keys[layer], self.values[layer], slots, tables, lens, self.attended,
                self.pdl,
            )  # fmt: skip
            self._linear_add("proj", self.attended, proj)
            self._norm_linear("up", up, self.inner, gelu=True)
            self._linear_add("down", self.inner, down)
        self._norm_linear("head", self.head, self.logits)
        return self.logits

    def _embed(self, token_ids: Tensor, positions: Tensor) -> None:
        model, D = self.model, self.config.hidden_size
        _embed[(1,)](
            token_ids, positions, model.embed.weight, model.embed_position.weight, self.x,
            D=D, PADDED=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip

    def _norm_linear(self, name: str, folded: tuple, out: Tensor, gelu: bool = False) -> None:
        weight, *factors = folded
        N, K = weight.shape
        _norm_linear[(self._programs(name, N),)](
            self.x, weight, *factors, out, self.config.norm_eps, N=N, K=K, PADDED=triton.next_power_of_2(K),
            GELU=gelu, **self._options(name, N),
        )  # fmt: skip

    def _linear_add(self, name: str, a: Tensor, linear: nn.Module) -> None:
        N, K = linear.weight.shape
        _linear_add[(self._programs(name, N),)](
            a, linear.weight, linear.bias, self.x, N=N, K=K, PADDED=triton.next_power_of_2(K),
            **self._options(name, N),
        )  # fmt: skip

    def _programs(self, name: str, N: int) -> int:
        tile = self.tiles[name]
        tiles = triton.cdiv(N, tile.rows)
        return min(tiles, tile.resident * self.multiprocessors) if tile.resident else tiles

    def _options(self, name: str, N: int) -> dict:
        tile = self.tiles[name]
        options = {"ROWS": tile.rows, "PROGRAMS": self._programs(name, N), "PDL": self.pdl}
        options |= {"num_warps": tile.warps, "launch_pdl": self.pdl}
        return options | ({"maxnreg": tile.registers} if tile.registers and self.pdl else {})
