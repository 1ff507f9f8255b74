"""A decode step of one sequence whose weights are codes: the kernels of Part 13's chain for one row. Part 17.

Promises engine/quantization/products.py's numbers up to rounding; how a vector is multiplied by codes,
`digits.py` shows. Which models have such layers, and what launches the chain: engine/quantization/row.py.
"""

import triton
import triton.language as tl

from engine.kernels.digits import dot, eight, place, split, whole
from engine.kernels.pdl import release, wait
from engine.kernels.single_row import Tile, gelu

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


@triton.jit
def embed_codes(
    token_ids, positions, words, word_scale, places, place_scale, x, D: tl.constexpr, PADDED: tl.constexpr
):
    """x[D] = the sum of the two tables' rows, codes times their scale; its numbers in their `place`s."""
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
    """Words[ROWS, WORDS] of rows `row`[ROWS], eight codes each, and their scales: [ROWS], or with groups one
    for each four words, as are their lows. Beyond the last row a word may be anything, since its sum is not
    stored; and beyond a row's end, since x is 0 there.
    """
    i = tl.arange(0, WORDS)
    w = tl.load(
        weight + row[:, None] * (K // 8) + i[None, :],
        mask=(i < K // 8)[None, :] & (row < N)[:, None],
        eviction_policy="evict_first",
    )
    if GROUP:
        COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
        quad = tl.arange(0, WORDS // 4)  # four words: 32 codes
        index = row[:, None] * COUNT + quad[None, :] * 32 // GROUP
        valid = (quad * 32 < K)[None, :] & (row < N)[:, None]
        s = tl.load(scale + index, mask=valid, other=0.0)
        least = tl.load(low + index, mask=valid, other=0.0)
    else:
        s = tl.load(scale + row, mask=row < N, other=0.0)
        least = s
    return w, s, least


@triton.jit
def norm_product(
    x, weight, scale, low, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · Wᵀ + bias, as single_row.py's. GELU: out is what `product_add` reads. GROUP: 0
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
            tl.store(out + place(row, N), gelu(y).to(out.dtype.element_ty), mask=row < N)
        else:
            tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            w, s, least, wg, wb = next_w, next_s, next_least, next_wg, next_wb


@triton.jit
def product_add(
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
