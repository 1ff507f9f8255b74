"""A decode step of one sequence whose weights are codes: the kernels of Part 13's chain for one row. Part 17.

Promises engine/quantization/products.py's numbers up to rounding. `digits.py` multiplies a vector by codes,
and says what a strided vector is. engine/quantization/single_row.py says which models have such layers, and
launches the chain.
"""

import triton
import triton.language as tl

from engine.kernels.digits import dot, load_contiguous, load_strided, strided_index, vector_digits
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
    token_ids, positions, token_codes, token_scale, position_codes, position_scale, x,
    D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """x[D], strided = the token's row of one table plus the position's of the other: codes times scales."""
    i = tl.arange(0, PADDED)
    inside = i < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    token_row = tl.load(token_codes + token * D + i, mask=inside, other=0).to(tl.float32)  # [PADDED]
    token_row = token_row * tl.load(token_scale + token)
    position_row = tl.load(position_codes + position * D + i, mask=inside, other=0).to(tl.float32)  # [PADDED]
    address = x + strided_index(i, D)
    tl.store(address, token_row + position_row * tl.load(position_scale + position), mask=inside)


@triton.jit
def _load_codes(
    weight, scale, low, row, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr
):
    """Rows `row`[ROWS]: words[ROWS, WORDS] of eight codes, and their scale and low: [ROWS] in int8, which has
    no low (the scale again), [ROWS, WORDS / 4] in int4. Beyond the last row a word may be anything, since its
    sum is not stored; and beyond a row's end, since x is 0 there.
    """
    i = tl.arange(0, WORDS)
    words = tl.load(
        weight + row[:, None] * (K // 8) + i[None, :],
        mask=(i < K // 8)[None, :] & (row < N)[:, None],
        eviction_policy="evict_first",
    )
    if GROUP:
        COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
        quad = tl.arange(0, WORDS // 4)  # four words: 32 codes
        index = row[:, None] * COUNT + quad[None, :] * 32 // GROUP  # [ROWS, WORDS / 4]
        valid = (quad * 32 < K)[None, :] & (row < N)[:, None]
        word_scale = tl.load(scale + index, mask=valid, other=0.0)
        word_low = tl.load(low + index, mask=valid, other=0.0)
    else:
        word_scale = tl.load(scale + row, mask=row < N, other=0.0)
        word_low = word_scale
    return words, word_scale, word_low


@triton.jit
def norm_product(
    x, weight, scale, low, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · Wᵀ + bias, as `_norm_linear` of single_row.py computes it, of a strided x. GELU:
    out is gelu of that, strided, for `product_add`. GROUP: 0 in int8.
    """
    # 1. What my first rows need, before anything that depends on the step.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words, scales, lows = _load_codes(weight, scale, low, row, N, K, WORDS, GROUP)
    wg = tl.load(weight_gain + row, mask=row < N, other=0.0)  # [ROWS]
    wb = tl.load(weight_bias + row, mask=row < N, other=0.0)  # [ROWS]
    g0, g1, g2, g3, g4, g5, g6, g7 = load_strided(gain, K, WORDS, GROUP)  # [WORDS] each
    release(PDL)
    # 2. The residual, and the norm's two numbers.
    wait(PDL)
    x0, x1, x2, x3, x4, x5, x6, x7 = load_strided(x, K, WORDS, GROUP)  # [WORDS] each
    mean = tl.sum(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, 0) / K
    square = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
    rstd = tl.rsqrt(tl.sum(square, 0) / K - mean * mean + eps)
    x0, x1, x2, x3, x4, x5, x6, x7 = x0 * g0, x1 * g1, x2 * g2, x3 * g3, x4 * g4, x5 * g5, x6 * g6, x7 * g7
    a_low, a_high, b_low, b_high, step, total = vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    # 3. Row by row, what the next rows need on its way.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_words, next_scales, next_lows = _load_codes(weight, scale, low, next_row, N, K, WORDS, GROUP)
            next_wg = tl.load(weight_gain + next_row, mask=next_row < N, other=0.0)
            next_wb = tl.load(weight_bias + next_row, mask=next_row < N, other=0.0)
        y = dot(words, scales, lows, a_low, a_high, b_low, b_high, step, total, ROWS, WORDS, GROUP)
        y = (y - mean * wg) * rstd + wb
        if GELU:
            tl.store(out + strided_index(row, N), gelu(y).to(out.dtype.element_ty), mask=row < N)
        else:
            tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            words, scales, lows, wg, wb = next_words, next_scales, next_lows, next_wg, next_wb


@triton.jit
def product_add(
    a, weight, scale, low, bias, x,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, STRIDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · Wᵀ + bias. x is strided; so is a, if STRIDED."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words, scales, lows = _load_codes(weight, scale, low, row, N, K, WORDS, GROUP)
    b = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    residual = tl.load(x + strided_index(row, N), mask=row < N, other=0.0)
    if STRIDED:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_strided(a, K, WORDS, GROUP)  # [WORDS] each
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_contiguous(a, K, WORDS)
    a_low, a_high, b_low, b_high, step, total = vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_words, next_scales, next_lows = _load_codes(weight, scale, low, next_row, N, K, WORDS, GROUP)
            next_b = tl.load(bias + next_row, mask=next_row < N, other=0.0).to(tl.float32)
            next_residual = tl.load(x + strided_index(next_row, N), mask=next_row < N, other=0.0)
        y = dot(words, scales, lows, a_low, a_high, b_low, b_high, step, total, ROWS, WORDS, GROUP)
        tl.store(x + strided_index(row, N), residual + y + b, mask=row < N)
        if PROGRAMS * ROWS < N:
            words, scales, lows, b, residual = next_words, next_scales, next_lows, next_b, next_residual
