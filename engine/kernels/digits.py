"""The product of a vector and rows of codes in whole numbers, which `quantized_row.py` uses. Part 17.

In a step of one row each code is used once, so converting codes to floats would cost more than the product.
Instead the vector x is rounded to whole numbers of 16 bits. Every whole number is two digits of eight bits:
x = (256 · high + low) · step. The instruction dp4a multiplies four digits by four codes. Rounding changes a
number of x by at most 1/64,000 of the largest number of x.

A word of codes is eight neighbours in a row: 64 bits in int8, and 32 bits in int4. GROUP is the number of
weights that share a scale in int4: a multiple of 32. In int8, where a whole row shares one scale, GROUP is 0.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter cannot run the instruction dp4a
# The largest number of x becomes MAX_STEPS steps. Both digits must stay within -128 to 127. So any limit
# up to 127 · 256 + 127 would do, and this limit leaves a margin for rounding.
MAX_STEPS = tl.constexpr(126 * 2**8)
# A float from 2**23 to 2**24 is a whole number, and its last 23 bits are this number less 2**23. So adding
# ROUNDER rounds a small number, and the bits of the sum less the bits of ROUNDER are the rounded number.
ROUNDER = tl.constexpr(1.5 * 2**23)
ROUNDER_BITS = tl.constexpr(0x4B400000)  # the bits of ROUNDER in fp32
TWO_OFFSETS = tl.constexpr(0x8080)  # 128 for each of a number's two digits, so that no digit is negative
HIGHEST_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080 as an int32: the highest bit of each of four bytes


@triton.jit
def interleaved_index(k, K: tl.constexpr):
    """The place of number k in an *interleaved* vector of K numbers.

    An interleaved vector has the shape [8, K / 8]: first all numbers with k % 8 = 0, then all with k % 8 = 1,
    and so on. Kernels pass vectors to each other in this order, since a thread reads neighbouring words of
    eight codes: the numbers for the first codes of these words lie side by side, the numbers for the second
    codes, too, and so on.
    """
    return k % 8 * (K // 8) + k // 8


@triton.jit
def load_interleaved(x, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """An interleaved x[K] -> eight vectors [WORDS]: the numbers with k % 8 = 0, 1, ... 7; 0 beyond K.

    A thread reads 16 bytes of codes at a time: 4 words in int4, and 2 words in int8. So a thread also gets 4
    or 2 neighbours of each vector.
    """
    i = tl.max_contiguous(tl.arange(0, WORDS), 4 if GROUP else 2)  # [WORDS]
    inside = i < K // 8
    x0 = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x + 1 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + 2 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(x + 3 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x4 = tl.load(x + 4 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x5 = tl.load(x + 5 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x6 = tl.load(x + 6 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    x7 = tl.load(x + 7 * (K // 8) + i, mask=inside, other=0.0).to(tl.float32)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def load_contiguous(x, K: tl.constexpr, WORDS: tl.constexpr):
    """As `load_interleaved`, for an x[K] in the usual order, which attention's result has."""
    k = tl.arange(0, 8 * WORDS)
    numbers = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)  # [8 * WORDS]
    # `split` splits the last axis. The three axes of length 2 are the bits of k % 8, the lowest bit last.
    even, odd = tl.split(tl.reshape(numbers, [WORDS, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _dp4a(a, b, c):
    """c + Σ a · b over the four bytes of a word a and a word b. Each byte is a whole number with a sign."""
    if INTERPRETED:  # the two shifts extract one byte with its sign
        for shift in tl.static_range(0, 32, 8):
            c += ((a << shift) >> 24) * ((b << shift) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _to_digits(a, b, c, d, steps_per_unit):
    """Four vectors of numbers[WORDS] -> (low digits, high digits), int32[WORDS] with four digits a word.

    A number becomes number · steps_per_unit steps. A low digit counts single steps, a high digit 256 steps.
    """
    a = (a * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    b = (b * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    c = (c * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    d = (d * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    return _pack_digits(a, b, c, d, 0), _pack_digits(a, b, c, d, 8)


@triton.jit
def _pack_digits(a, b, c, d, shift: tl.constexpr):
    """One word with the digits from bit `shift` on of four numbers. Each digit has an offset of 128
    (TWO_OFFSETS). Subtracting 128 from a byte flips its highest bit, so one `^` removes all four offsets.
    """
    a, b, c, d = (a >> shift) & 255, (b >> shift) & 255, (c >> shift) & 255, (d >> shift) & 255
    return (a | (b << 8) | (c << 16) | (d << 24)) ^ HIGHEST_BITS


@triton.jit
def vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """The vectors x0 to x7 of `load_interleaved` -> a_low, a_high, b_low, b_high, step, total, for `dot`.

    a_* and b_* are int32[WORDS] with four digits a word, where x = (256 · high + low) · step. `dot` takes a
    word of eight codes as two operands of dp4a. In int8 the digits a belong to the codes 0 to 3, and b to the
    codes 4 to 7. In int4 the digits a belong to the even codes (the low four bits of a byte), and b to the
    odd codes. total[WORDS / 4], in int4 only, has the sum of x over 32 numbers, which `dot` multiplies by the
    offset of the numbers' group.
    """
    largest_0123 = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    largest_4567 = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    largest = tl.max(tl.maximum(largest_0123, largest_4567), 0)
    largest = tl.maximum(largest, 1e-30)  # so that a vector of zeros is not divided by 0
    steps_per_unit = MAX_STEPS / largest
    if GROUP:
        a_low, a_high = _to_digits(x0, x2, x4, x6, steps_per_unit)
        b_low, b_high = _to_digits(x1, x3, x5, x7, steps_per_unit)
        total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
        total = tl.sum(tl.reshape(total, [WORDS // 4, 4]), 1)
    else:
        a_low, a_high = _to_digits(x0, x1, x2, x3, steps_per_unit)
        b_low, b_high = _to_digits(x4, x5, x6, x7, steps_per_unit)
        total = x0  # any tensor will do: int8 has no offsets, so `dot` does not read `total`
    return a_low, a_high, b_low, b_high, largest / MAX_STEPS, total


@triton.jit
def dot(
    words, scale, offset, a_low, a_high, b_low, b_high, step, total,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[ROWS]: the sum of x · weight for each row, where weight = code · scale in int8, and
    offset + code · scale in int4.

    words[ROWS, WORDS] hold eight codes each. int8: scale[ROWS]. int4: scale and offset[ROWS, WORDS / 4], with
    a number for each 32 codes: a larger group has its number several times. The parameters from `a_low` to
    `total` are the results of `vector_digits`.
    """
    # 1. Split the eight codes of each word into two words of four bytes, for the digits a and b of x.
    if GROUP:
        a, b = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    else:
        a, b = words.to(tl.int32), (words >> 32).to(tl.int32)
    # 2. Multiply codes by digits in whole numbers. A sum is below 8 · 128 · MAX_STEPS < 2**31.
    zero = tl.zeros([ROWS, WORDS], tl.int32)
    y_low = _dp4a(b, b_low[None, :], _dp4a(a, a_low[None, :], zero))
    y_high = _dp4a(b, b_high[None, :], _dp4a(a, a_high[None, :], zero))
    y = y_high * 256 + y_low  # [ROWS, WORDS]
    # 3. Convert the sums to floats, and multiply by the scales. Four words (32 codes) share a scale in int4.
    if GROUP:
        y = tl.sum(tl.reshape(y, [ROWS, WORDS // 4, 4]), 2).to(tl.float32)  # [ROWS, WORDS / 4]
        return tl.sum(y * (scale.to(tl.float32) * step) + total[None, :] * offset.to(tl.float32), 1)
    else:
        return tl.sum(y.to(tl.float32), 1) * (scale * step)
