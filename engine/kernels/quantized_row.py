"""A decode step of one sequence whose weights are codes: Part 13's chain for one row, over Part 17's layers.

Promises products.py's numbers up to rounding, in fp32. Each code is used once, so what makes it a number has
to be cheap: nothing is converted. A word of 32 bits holds four codes of int8 or eight of int4. Shifted and
masked, a code lies in the upper bits of a float's fraction, below the exponent of 1:

    int8: the float is 1.5 + code / 256      int4: 1 + code / 16, and for even numbers 1 + code / 256

and Σ x · float = 1.5 · Σ x + Σ x · code / 256, where the first sum is the same for every row of W.
Does not know adapters, nor models whose arithmetic is not GPT-2's.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine import graphs
from engine.cache.paged import PagedCache
from engine.kernels.pdl import release, wait
from engine.kernels.single_row import SingleRow, Tile, _gelu
from engine.layers.replace import linear_names
from engine.quantization.layers import Int4Linear, Int8Embedding, Int8Linear

TILES = {
    "int8": {
        "qkv": Tile(4, 4, 4),
        "proj": Tile(4, 4, 4),
        "up": Tile(4, 4, 4),
        "down": Tile(4, 16, 1),
        "head": Tile(4, 4, 4),
    },
    "int4": {
        "qkv": Tile(8, 4, 3),
        "proj": Tile(4, 4, 4),
        "up": Tile(8, 4, 3),
        "down": Tile(4, 16, 1),
        "head": Tile(4, 4, 4),
    },
}
# A float's exponent: what a code is put below. Arguments of the kernels: a processor's instruction takes one
# number that the compiler knows, and the mask is one already.
ONE, ONE_AND_A_HALF = 0x3F800000, 0x3FC00000


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
    place = tl.load(places + position * D + i, mask=inside, other=0).to(tl.float32)
    tl.store(x + i, word + place * tl.load(place_scale + position), mask=inside)


@triton.jit
def _four(x, COUNT: tl.constexpr):
    """x[4 · COUNT] -> the numbers 4i, 4i + 1, 4i + 2 and 4i + 3 of it, [COUNT] each."""
    even, odd = tl.split(tl.reshape(x, [COUNT, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _read(
    weight, scale, low, row, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr
):
    """Words [ROWS, WORDS] of these rows, and their scales: [ROWS], or with groups one for each four words,
    as are their lows. A row beyond the last gets anything: nobody stores its sum. So does a word beyond the
    row's end: it is a float from 1 to 2, and x is 0 there.
    """
    i = tl.arange(0, WORDS)
    if GROUP:
        w = tl.load(
            weight + row[:, None] * (K // 8) + i[None, :],
            mask=(i < K // 8)[None, :] & (row < N)[:, None],
            eviction_policy="evict_first",
        )
        COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
        four = tl.arange(0, WORDS // 4)
        own = row[:, None] * COUNT + four[None, :] * 32 // GROUP
        there = (four * 32 < K)[None, :] & (row < N)[:, None]
        s = tl.load(scale + own, mask=there, other=0.0)
        least = tl.load(low + own, mask=there, other=0.0)
    else:
        w = tl.load(
            weight + row[:, None] * (K // 4) + i[None, :],
            mask=(i < K // 4)[None, :] & (row < N)[:, None],
            eviction_policy="evict_first",
        )
        s = tl.load(scale + row, mask=row < N, other=0.0)
        least = s
    return w, s, least


@triton.jit
def _product8(w, s, x0, x1, x2, x3, one):
    """Σ x · code · scale: [ROWS]. A word's bytes, from the lowest."""
    y = -1.5 * (x0 + x1 + x2 + x3)[None, :]
    y += (((w << 15) & 0x7F8000) ^ one).to(tl.float32, bitcast=True) * x0[None, :]
    y += (((w << 7) & 0x7F8000) ^ one).to(tl.float32, bitcast=True) * x1[None, :]
    y += (((w >> 1) & 0x7F8000) ^ one).to(tl.float32, bitcast=True) * x2[None, :]
    y += (((w >> 9) & 0x7F8000) ^ one).to(tl.float32, bitcast=True) * x3[None, :]
    return tl.sum(y, 1) * (s * 256)


@triton.jit
def _product4(
    w, s, least, x0, x1, x2, x3, x4, x5, x6, x7, total, one, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Σ x · (low + code · scale): [ROWS]. The even numbers come 16 times as large, as their codes are 16
    times as small; total[WORDS // 4]: a sixteenth of the sum of x for each four words, 32 codes, which have
    one scale.
    """
    y = -(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7)[None, :]
    y += (((w << 15) & 0x078000) | one).to(tl.float32, bitcast=True) * x0[None, :]
    y += (((w << 15) & 0x780000) | one).to(tl.float32, bitcast=True) * x1[None, :]
    y += (((w << 7) & 0x078000) | one).to(tl.float32, bitcast=True) * x2[None, :]
    y += (((w << 7) & 0x780000) | one).to(tl.float32, bitcast=True) * x3[None, :]
    y += (((w >> 1) & 0x078000) | one).to(tl.float32, bitcast=True) * x4[None, :]
    y += (((w >> 1) & 0x780000) | one).to(tl.float32, bitcast=True) * x5[None, :]
    y += (((w >> 9) & 0x078000) | one).to(tl.float32, bitcast=True) * x6[None, :]
    y += (((w >> 9) & 0x780000) | one).to(tl.float32, bitcast=True) * x7[None, :]
    y = tl.sum(tl.reshape(y, [ROWS, WORDS // 4, 4]), 2)  # [ROWS, WORDS // 4]
    return 16 * tl.sum(y * s.to(tl.float32) + total[None, :] * least.to(tl.float32), 1)


@triton.jit
def _norm_product(
    x, weight, scale, low, gain, weight_gain, weight_bias, out, eps, one,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · Wᵀ + bias, as single_row.py's. GROUP: 0 for int8."""
    # 1. What my first rows need, before anything that depends on the step.
    WORDS: tl.constexpr = PADDED // (8 if GROUP else 4)
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w, s, least = _read(weight, scale, low, row, N, K, WORDS, GROUP)
    wg = tl.load(weight_gain + row, mask=row < N, other=0.0)
    wb = tl.load(weight_bias + row, mask=row < N, other=0.0)
    g = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    release(PDL)
    # 2. The residual, and the norm's two numbers.
    wait(PDL)
    a = tl.load(x + k, mask=k < K, other=0.0)
    mean = tl.sum(a, 0) / K
    rstd = tl.rsqrt(tl.sum(a * a, 0) / K - mean * mean + eps)
    if GROUP:
        even, odd = tl.split(tl.reshape(a * g, [PADDED // 2, 2]))
        x0, x2, x4, x6 = _four(16 * even, WORDS)
        x1, x3, x5, x7 = _four(odd, WORDS)
        total = tl.sum(tl.reshape(a * g, [WORDS // 4, 32]), 1) / 16
    else:
        x0, x1, x2, x3 = _four(a * g, WORDS)
    # 3. Row by row, what the next rows need on its way.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            next_w, next_s, next_least = _read(weight, scale, low, later, N, K, WORDS, GROUP)
            next_wg = tl.load(weight_gain + later, mask=later < N, other=0.0)
            next_wb = tl.load(weight_bias + later, mask=later < N, other=0.0)
        if GROUP:
            y = _product4(w, s, least, x0, x1, x2, x3, x4, x5, x6, x7, total, one, ROWS, WORDS)
        else:
            y = _product8(w, s, x0, x1, x2, x3, one)
        y = (y - mean * wg) * rstd + wb
        if GELU:
            y = _gelu(y)
        tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            w, s, least, wg, wb = next_w, next_s, next_least, next_wg, next_wb


@triton.jit
def _product_add(
    a, weight, scale, low, bias, x, one,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · Wᵀ + bias."""
    WORDS: tl.constexpr = PADDED // (8 if GROUP else 4)
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w, s, least = _read(weight, scale, low, row, N, K, WORDS, GROUP)
    b = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    before = tl.load(x + row, mask=row < N, other=0.0)
    vector = tl.load(a + k, mask=k < K, other=0.0).to(tl.float32)
    if GROUP:
        even, odd = tl.split(tl.reshape(vector, [PADDED // 2, 2]))
        x0, x2, x4, x6 = _four(16 * even, WORDS)
        x1, x3, x5, x7 = _four(odd, WORDS)
        total = tl.sum(tl.reshape(vector, [WORDS // 4, 32]), 1) / 16
    else:
        x0, x1, x2, x3 = _four(vector, WORDS)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            later = row + PROGRAMS * ROWS
            next_w, next_s, next_least = _read(weight, scale, low, later, N, K, WORDS, GROUP)
            next_b = tl.load(bias + later, mask=later < N, other=0.0).to(tl.float32)
            next_before = tl.load(x + later, mask=later < N, other=0.0)
        if GROUP:
            y = _product4(w, s, least, x0, x1, x2, x3, x4, x5, x6, x7, total, one, ROWS, WORDS)
        else:
            y = _product8(w, s, x0, x1, x2, x3, one)
        tl.store(x + row, before + y + b, mask=row < N)
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
        return linear, norm.weight, gain - linear.bias.float(), shift.clone()  # where 16 bytes begin

    def _embed(self, token_ids: Tensor, positions: Tensor) -> None:
        model, D = self.model, self.config.hidden_size
        _embed_codes[(1,)](
            token_ids, positions, model.embed.codes, model.embed.scale, model.embed_position.codes,
            model.embed_position.scale, self.x, D=D, PADDED=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip

    def _norm_linear(self, name: str, folded: tuple, out: Tensor, gelu: bool = False) -> None:
        linear, *factors = folded
        weight, scale, low, one, shape = _operands(linear)
        _norm_product[(self._programs(name, linear.out_features),)](
            self.x, weight, scale, low, *factors, out, self.config.norm_eps, one, **shape, GELU=gelu,
            **self._options(name, linear.out_features),
        )  # fmt: skip

    def _linear_add(self, name: str, a: Tensor, linear: nn.Module) -> None:
        weight, scale, low, one, shape = _operands(linear)
        _product_add[(self._programs(name, linear.out_features),)](
            a, weight, scale, low, linear.bias, self.x, one, **shape,
            **self._options(name, linear.out_features),
        )  # fmt: skip


def _codes(layer: nn.Module) -> Tensor | None:
    return layer.packed if isinstance(layer, Int4Linear) else layer.codes


def _operands(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor, int, dict[str, int]]:
    """Words, scale, low (int8: none, the scale again), the exponent, and the shape as kernels want it."""
    grouped = isinstance(layer, Int4Linear)
    K = layer.in_features
    shape = {"N": layer.out_features, "K": K, "PADDED": max(32, triton.next_power_of_2(K))}
    shape["GROUP"] = layer.group_size if grouped else 0
    low, one = (layer.low, ONE) if grouped else (layer.scale, ONE_AND_A_HALF)
    return _codes(layer).view(torch.int32), layer.scale, low, one, shape
