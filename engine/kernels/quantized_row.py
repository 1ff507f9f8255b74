"""The kernels of a decode step of one sequence of a quantized GPT-2, as in single_row.py of Part 13. Part 17.

Promises the numbers of engine/quantization/products.py up to rounding. `digits.py` multiplies a vector by
codes, and defines interleaved vectors and GROUP. engine/quantization/single_row.py launches the kernels, and
decides which models have fitting layers.
"""

import triton
import triton.language as tl

from engine.kernels.digits import dot, interleaved_index, load_contiguous, load_interleaved, vector_digits
from engine.kernels.pdl import release, wait
from engine.kernels.single_row import gelu
from engine.kernels.tiles import Tile

# The fastest tiles that benchmarks/part17_rows.py found on an H200, for the widths of GPT-3 6.7B.
TILES = {
    "int8": {
        "qkv": Tile(rows=8, warps=4, resident=6),
        "proj": Tile(rows=16, warps=4, resident=None),
        "up": Tile(rows=8, warps=4, resident=6),
        "down": Tile(rows=2, warps=8, resident=4),
        "head": Tile(rows=4, warps=4, resident=8),
    },
    "int4": {
        "qkv": Tile(rows=8, warps=4, resident=3),
        "proj": Tile(rows=16, warps=4, resident=None),
        "up": Tile(rows=8, warps=4, resident=3),
        "down": Tile(rows=4, warps=16, resident=1),
        "head": Tile(rows=4, warps=4, resident=4),
    },
}


@triton.jit
def embed_codes(
    token_ids, positions, token_codes, token_scale, position_codes, position_scale, x,
    D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """x[D], interleaved, = the token's row of the token table + the position's row of the position table. A
    row of a table is its codes times its scale.
    """
    column = tl.arange(0, PADDED)
    inside = column < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    token_row = tl.load(token_codes + token * D + column, mask=inside, other=0).to(tl.float32)  # [PADDED]
    token_row = token_row * tl.load(token_scale + token)
    position_row = tl.load(position_codes + position * D + column, mask=inside, other=0).to(tl.float32)
    address = x + interleaved_index(column, D)
    tl.store(address, token_row + position_row * tl.load(position_scale + position), mask=inside)


@triton.jit
def _load_codes(
    weight, scale, low, row, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr
):
    """Load the rows row[ROWS] of a layer, for `dot` -> words[ROWS, WORDS] of eight codes, scale and offset.

    In int4 scale and offset are [ROWS, WORDS / 4]; the offset is the layer's `low`. In int8 both are [ROWS];
    int8 has no offset: the scale stands in its place, and `dot` does not read the second copy.

    Words beyond the last row may hold anything, since their sums are not stored. Words beyond a row's end may
    hold anything, too, since x is 0 there.
    """
    word = tl.arange(0, WORDS)
    words = tl.load(
        weight + row[:, None] * (K // 8) + word[None, :],
        mask=(word < K // 8)[None, :] & (row < N)[:, None],
        eviction_policy="evict_first",  # a step reads each word once, so no cache needs to keep the word
    )
    if GROUP:
        NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP  # of a row
        quad = tl.arange(0, WORDS // 4)  # [WORDS / 4]: four words are 32 codes, the smallest group
        index = row[:, None] * NUM_GROUPS + quad[None, :] * 32 // GROUP  # [ROWS, WORDS / 4]
        valid = (quad * 32 < K)[None, :] & (row < N)[:, None]
        word_scale = tl.load(scale + index, mask=valid, other=0.0)
        word_offset = tl.load(low + index, mask=valid, other=0.0)
    else:
        word_scale = tl.load(scale + row, mask=row < N, other=0.0)
        word_offset = word_scale
    return words, word_scale, word_offset


@triton.jit
def norm_product(
    x, weight, scale, low, gain, weight_gain, weight_bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · Wᵀ + bias, where x is interleaved. With GELU, out is gelu of this product, and
    interleaved, as `product_add` reads its input.

    The norm needs no pass of its own, as in `_norm_linear` of single_row.py:
    out = ((g·x) · Wᵀ - mean · (W·g)) · rstd + (W·b + c).
    """
    # 1. The weights of this program's first ROWS rows, which no kernel of the step writes.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words, scales, offsets = _load_codes(weight, scale, low, row, N, K, WORDS, GROUP)
    weight_gains = tl.load(weight_gain + row, mask=row < N, other=0.0)  # [ROWS]
    weight_biases = tl.load(weight_bias + row, mask=row < N, other=0.0)  # [ROWS]
    g0, g1, g2, g3, g4, g5, g6, g7 = load_interleaved(gain, K, WORDS, GROUP)  # [WORDS] each
    release(PDL)
    # 2. The residual x, the norm's mean and rstd, and g·x as digits.
    wait(PDL)
    x0, x1, x2, x3, x4, x5, x6, x7 = load_interleaved(x, K, WORDS, GROUP)  # [WORDS] each
    mean = tl.sum(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, 0) / K
    square = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
    rstd = tl.rsqrt(tl.sum(square, 0) / K - mean * mean + eps)
    x0, x1, x2, x3, x4, x5, x6, x7 = x0 * g0, x1 * g1, x2 * g2, x3 * g3, x4 * g4, x5 * g5, x6 * g6, x7 * g7
    a_low, a_high, b_low, b_high, step, total = vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    # 3. ROWS rows at a time. The weights of the next rows are loaded while the current rows are computed.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_words, next_scales, next_offsets = _load_codes(
                weight, scale, low, next_row, N, K, WORDS, GROUP
            )
            next_weight_gains = tl.load(weight_gain + next_row, mask=next_row < N, other=0.0)
            next_weight_biases = tl.load(weight_bias + next_row, mask=next_row < N, other=0.0)
        product = dot(words, scales, offsets, a_low, a_high, b_low, b_high, step, total, ROWS, WORDS, GROUP)
        product = (product - mean * weight_gains) * rstd + weight_biases
        if GELU:
            tl.store(out + interleaved_index(row, N), gelu(product).to(out.dtype.element_ty), mask=row < N)
        else:
            tl.store(out + row, product.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            words, scales, offsets = next_words, next_scales, next_offsets
            weight_gains, weight_biases = next_weight_gains, next_weight_biases


@triton.jit
def product_add(
    a, weight, scale, low, bias, x,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · Wᵀ + bias, where x is interleaved. INTERLEAVED: whether a is interleaved, too.
    Attention's result is not.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words, scales, offsets = _load_codes(weight, scale, low, row, N, K, WORDS, GROUP)
    biases = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    residual = tl.load(x + interleaved_index(row, N), mask=row < N, other=0.0)
    if INTERLEAVED:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_interleaved(a, K, WORDS, GROUP)  # [WORDS] each
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_contiguous(a, K, WORDS)
    a_low, a_high, b_low, b_high, step, total = vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS, GROUP)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = row + PROGRAMS * ROWS
            next_words, next_scales, next_offsets = _load_codes(
                weight, scale, low, next_row, N, K, WORDS, GROUP
            )
            next_biases = tl.load(bias + next_row, mask=next_row < N, other=0.0).to(tl.float32)
            next_residual = tl.load(x + interleaved_index(next_row, N), mask=next_row < N, other=0.0)
        product = dot(words, scales, offsets, a_low, a_high, b_low, b_high, step, total, ROWS, WORDS, GROUP)
        tl.store(x + interleaved_index(row, N), residual + product + biases, mask=row < N)
        if PROGRAMS * ROWS < N:
            words, scales, offsets = next_words, next_scales, next_offsets
            biases, residual = next_biases, next_residual
