"""A decode step of one sequence whose weights are codes: Part 13's chain for one row, over Part 17's layers.

Promises products.py's numbers up to rounding; how a vector is multiplied by codes, `digits.py` shows. Does
not know adapters, nor models whose arithmetic is not GPT-2's.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine import graphs
from engine.cache.paged import PagedCache
from engine.kernels.digits import dot, eight, place, split, whole
from engine.kernels.pdl import release, wait
from engine.kernels.single_row import SingleRow, Tile, _gelu
from engine.layers.replace import linear_names
from engine.quantization.layers import Int4Linear, Int8Embedding, Int8Linear

TILES = {
    "int8": {
        "qkv": Tile(8, 4, 6),
        "proj": Tile(16, 4, None),
        "up": Tile(8, 4, 6),
        "down": Tile(2, 8, 4),
        "head": Tile(4, 4, 8),
    },
    "int4": {
        "qkv": Tile(8, 4, 3),
        "proj": Tile(16, 4, None),
        "up": Tile(8, 4, 3),
        "down": Tile(4, 16, 1),
        "head": Tile(4, 4, 4),
    },
}


def steps(model: nn.Module, cache: PagedCache, max_rows: int) -> Callable[[int], graphs.Step]:
    """How a step of so many rows is computed: one row of a quantized GPT-2 by this file, else as Part 13
    does. For `GraphForward(make_steps=)`.
    """
    many = graphs.steps(model, cache, max_rows)
    if not QuantizedRow.fits(model):
        return many
    one = QuantizedRow(model, list(cache.keys), list(cache.values))
    return lambda rows: one if rows == 1 else many(rows)


@triton.jit
def _embed_codes(
    token_ids, positions, words, word_scale, places, place_scale, x, D: tl.constexpr, PADDED: tl.constexpr
):
    i = tl.arange(0, PADDED)
    inside = i < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    word = tl.load(words + token * D + i, mask=inside, other=0).to(tl.float32) * tl.load(word_scale + token)
    shift = tl.load(places + position * D + i, mask=inside, other=0).to(tl.float32)
    tl.store(x + place(i, D), word + shift * tl.load(place_scale + position), mask=inside)


@triton.jit
def _read(
    weight, scale, low, row, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr
):
    """Words [ROWS, WORDS] of these rows, eight codes each, and their scales: [ROWS], or with groups one for
    each four words, as are their lows. A row beyond the last gets anything: nobody stores its sum. So does a
    word beyond the row's end: x is 0 there.
    """
    i = tl.arange(0, WORDS)
    w = tl.load(
        weight + row[:, None] * (K // 8) + i[None, :],
        mask=(i < K // 8)[None, :] & (row < N)[:, None],
        eviction_policy="evict_first",
    )
    if GROUP:
        COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
        four = tl.arange(0, WORDS // 4)
        own = row[:, None] * COUNT + four[None, :] * 32 // GROUP
        there = (four * 32 < K)[None, :] & (row < N)[:, None]
        s = tl.load(scale + own, mask=there, other=0.0)
        least = tl.load(low + own, mask=there, other=0.0)
    else:
        s = tl.load(scale + row, mask=row < N, other=0.0)
        least = s
    return w, s, least


@triton.jit
def _norm_product(
    x, weight, scale, low, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · Wᵀ + bias, as single_row.py's. GELU: out is what `_product_add` reads. GROUP: 0
    in int8.
    """
    # 1. What my first rows need, before anything that depends on the step.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w, s, least = _read(weight, scale, low, row, N, K, WORDS, GROUP)
    wg = tl.load(weight_gain + row, mask=row < N, other=0.0)
    wb = tl.load(weight_bias + row, mask=row < N, other=0.0)
    g0, g1, g2, g3, g4, g5, g6, g7 = eight(gain, K, WORDS, GROUP)
    release(PDL)
    # 2. The residual, and the norm's two numbers.
    wait(PDL)
    x0, x1, x2, x3, x4, x5, x6, x7 = eight(x, K, WORDS, GROUP)
    mean = tl.sum(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, 0) / K
    square = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
    rstd = tl.rsqrt(tl.sum(square, 0) / K - mean * mean + eps)
    x0, x1, x2, x3, x4, x5, x6, x7 = x0 * g0, x1 * g1, x2 * g2, x3 * g3, x4 * g4, x5 * g5, x6 * g6, x7 * g7
    a0, a1, b0, b1, unit, total = whole(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    # 3. Row by row, what the next rows need on its way.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            next_w, next_s, next_least = _read(weight, scale, low, later, N, K, WORDS, GROUP)
            next_wg = tl.load(weight_gain + later, mask=later < N, other=0.0)
            next_wb = tl.load(weight_bias + later, mask=later < N, other=0.0)
        y = dot(w, s, least, a0, a1, b0, b1, unit, total, ROWS, WORDS, GROUP)
        y = (y - mean * wg) * rstd + wb
        if GELU:
            tl.store(out + place(row, N), _gelu(y).to(out.dtype.element_ty), mask=row < N)
        else:
            tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            w, s, least, wg, wb = next_w, next_s, next_least, next_wg, next_wb


@triton.jit
def _product_add(
    a, weight, scale, low, bias, x,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · Wᵀ + bias. PLACED: a's numbers are in their `place`s, as x's always are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w, s, least = _read(weight, scale, low, row, N, K, WORDS, GROUP)
    b = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    before = tl.load(x + place(row, N), mask=row < N, other=0.0)
    if PLACED:
        x0, x1, x2, x3, x4, x5, x6, x7 = eight(a, K, WORDS, GROUP)
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = split(a, K, WORDS)
    a0, a1, b0, b1, unit, total = whole(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            next_w, next_s, next_least = _read(weight, scale, low, later, N, K, WORDS, GROUP)
            next_b = tl.load(bias + later, mask=later < N, other=0.0).to(tl.float32)
            next_before = tl.load(x + place(later, N), mask=later < N, other=0.0)
        y = dot(w, s, least, a0, a1, b0, b1, unit, total, ROWS, WORDS, GROUP)
        tl.store(x + place(row, N), before + y + b, mask=row < N)
        if PROGRAMS * ROWS < N:
            w, s, least, b, before = next_w, next_s, next_least, next_b, next_before


class QuantizedRow(SingleRow):
    """`SingleRow` of a model whose linear layers and tables are codes: int8, or int4 with an int8 head."""

    def __init__(self, model: nn.Module, keys: list[Tensor], values: list[Tensor]) -> None:
        super().__init__(model, keys, values)
        self.tiles = TILES[model.quantization.method]

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether this is a GPT-2 whose layers are as `quantize` made them, with their codes where they were
        (a kernel for CPUs may have put them in a layout of its own).
        """
        if not SingleRow.knows(model.config) or getattr(model, "quantization", None) is None:
            return False
        linears = [model.get_submodule(name) for name in linear_names(model)]
        tables = model.embed, model.embed_position
        return (
            len(linears) == 4 * model.config.num_layers + 1
            and all(type(layer) in (Int8Linear, Int4Linear) for layer in linears)
            and all(_codes(layer) is not None and layer.in_features % 8 == 0 for layer in linears)
            and all(isinstance(table, Int8Embedding) for table in tables)
        )

    def _fold(self, norm: nn.Module, linear: nn.Module) -> tuple:
        """What no step changes: W·g, and W·b + c."""
        both = torch.stack([norm.weight, norm.bias]).float()
        gain, shift = linear(both).float()
        placed = norm.weight.view(-1, 8).t().contiguous()
        return linear, placed, gain - linear.bias.float(), shift.clone()  # where 16 bytes begin

    def _embed(self, token_ids: Tensor, positions: Tensor) -> None:
        model, D = self.model, self.config.hidden_size
        _embed_codes[(1,)](
            token_ids, positions, model.embed.codes, model.embed.scale, model.embed_position.codes,
            model.embed_position.scale, self.x, D=D, PADDED=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip

    def _norm_linear(self, name: str, folded: tuple, out: Tensor, gelu: bool = False) -> None:
        linear, *factors = folded
        weight, scale, low, shape = _operands(linear)
        _norm_product[(self._programs(name, linear.out_features),)](
            self.x, weight, scale, low, *factors, out, self.config.norm_eps, **shape, GELU=gelu,
            **self._options(name, linear.out_features),
        )  # fmt: skip

    def _linear_add(self, name: str, a: Tensor, linear: nn.Module) -> None:
        weight, scale, low, shape = _operands(linear)
        _product_add[(self._programs(name, linear.out_features),)](
            a, weight, scale, low, linear.bias, self.x, **shape, PLACED=name == "down",
            **self._options(name, linear.out_features),
        )  # fmt: skip


def _codes(layer: nn.Module) -> Tensor | None:
    return layer.packed if isinstance(layer, Int4Linear) else layer.codes


def _operands(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """Words, scale, low (int8: none, the scale again), and the shape as kernels want it."""
    K, grouped = layer.in_features, isinstance(layer, Int4Linear)
    shape = {"N": layer.out_features, "K": K, "WORDS": max(4, triton.next_power_of_2(K // 8))}
    shape["GROUP"] = layer.group_size if grouped else 0
    words = layer.packed.view(torch.int32) if grouped else layer.codes.view(torch.int64)
    low = layer.low if grouped else layer.scale
    return words, layer.scale, low, shape
