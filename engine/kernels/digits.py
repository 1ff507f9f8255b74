"""A vector times rows of codes in whole numbers: what `quantized_row.py` computes with. Part 17.

Each code is used once, so making it a float would cost more than the product. Instead the vector x is
rounded to whole numbers of 16 bits, each two digits of eight bits: x = (256 · high + low) · step. Digits are
multiplied by codes, four in one instruction (dp4a). Rounding changes a number of x by at most 1/64,000 of the
largest. A word of codes is eight neighbours of a row: 64 bits in int8, 32 in int4. GROUP is int4's number of
weights with one scale, and 0 in int8, whose rows have one scale each.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # then there is no instruction dp4a to call
# The largest number of x becomes so many steps. 126, and not 127: rounding may carry 1 into the high digit,
# and both digits stay within -128 to 127.
MAX_STEPS = tl.constexpr(126 * 2**8)
# A float between 2**23 and 2**24 is a whole number, and its last bits are that number. So adding ROUNDER to a
# smaller float rounds it, and subtracting ROUNDER's own bits leaves the whole number.
ROUNDER = tl.constexpr(1.5 * 2**23)
ROUNDER_BITS = tl.constexpr(0x4B400000)
TWO_OFFSETS = tl.constexpr(0x8080)  # 128 for each of a number's two digits, so that none is negative
HIGHEST_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080 in 32 bits with a sign: the highest bit of four bytes


@triton.jit
def interleaved_index(k, K: tl.constexpr):
    """Where number k of an *interleaved* vector lies: all numbers 8i first, then all 8i + 1, and so on, as
    [8, K / 8]. Vectors lie so between two kernels: a thread reads neighbouring words of eight codes, and
    finds the numbers for the words' first codes side by side, then those for their second codes, and so on.
    """
    return k % 8 * (K // 8) + k // 8


@triton.jit
def load_interleaved(x, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """An interleaved x[K] -> its numbers 8i, its numbers 8i + 1, ... 8i + 7, [WORDS] each; 0 beyond K. A
    thread reads 16 bytes of words at a time, which are 4 words in int4 and 2 in int8, and as many of each.
    """
    i = tl.max_contiguous(tl.arange(0, WORDS), 4 if GROUP else 2)  # [WORDS]; 4 or 2 neighbours a thread
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
    """As `load_interleaved`, of an x[K] in the usual order: attention's result."""
    k = tl.arange(0, 8 * WORDS)
    numbers = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)  # [8 * WORDS]
    # `split` takes the last axis apart, so the three bits of k % 8 are split off from the lowest to the
    # highest.
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
    """c + Σ a · b over the four bytes of each, which are whole numbers with a sign."""
    if INTERPRETED:  # the two shifts leave one byte, with its sign
        for shift in tl.static_range(0, 32, 8):
            c += ((a << shift) >> 24) * ((b << shift) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _to_digits(a, b, c, d, steps_per_unit):
    """Four vectors of numbers[WORDS] -> int32[WORDS] of their low digits and of their high ones, four in a
    word. A number becomes number · steps_per_unit steps; a low digit counts 1 step, a high one 256.
    """
    a = (a * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    b = (b * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    c = (c * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    d = (d * steps_per_unit + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    return _pack_digits(a, b, c, d, 0), _pack_digits(a, b, c, d, 8)


@triton.jit
def _pack_digits(a, b, c, d, shift: tl.constexpr):
    """The digit at bit `shift` of each of four numbers, in one word. Each has an offset of 128 (TWO_OFFSETS):
    to take it off flips a byte's highest bit.
    """
    a, b, c, d = (a >> shift) & 255, (b >> shift) & 255, (c >> shift) & 255, (d >> shift) & 255
    return (a | (b << 8) | (c << 16) | (d << 24)) ^ HIGHEST_BITS


@triton.jit
def vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """x as digits for `dot`: a_low, a_high, b_low, b_high, step, total. x0 to x7: as `load_interleaved` gives
    them.

    a_* and b_*: int32[WORDS], four digits each. A word of eight codes is two operands of dp4a. int8: a meets
    codes 0 to 3, b codes 4 to 7. int4: a meets the even codes (a byte's low four bits), b the odd ones.
    x = (256 · high + low) · step. total[WORDS / 4], in int4 only: the sum of x over 32 numbers, which `dot`
    multiplies by their group's offset.
    """
    largest_0123 = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    largest_4567 = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    largest = tl.max(tl.maximum(largest_0123, largest_4567), 0)
    largest = tl.maximum(largest, 1e-30)  # of a vector of zeros: nothing is divided by 0
    steps_per_unit = MAX_STEPS / largest
    if GROUP:
        a_low, a_high = _to_digits(x0, x2, x4, x6, steps_per_unit)
        b_low, b_high = _to_digits(x1, x3, x5, x7, steps_per_unit)
        total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
        total = tl.sum(tl.reshape(total, [WORDS // 4, 4]), 1)
    else:
        a_low, a_high = _to_digits(x0, x1, x2, x3, steps_per_unit)
        b_low, b_high = _to_digits(x4, x5, x6, x7, steps_per_unit)
        total = x0  # int8 has no offsets: `dot` does not read it
    return a_low, a_high, b_low, b_high, largest / MAX_STEPS, total


@triton.jit
def dot(
    words, scale, offset, a_low, a_high, b_low, b_high, step, total,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Σ x · weight of each row: [ROWS]. weight = code · scale (int8), offset + code · scale (int4).

    words[ROWS, WORDS] of eight codes; scale[ROWS] (int8), scale and offset[ROWS, WORDS / 4] (int4). The rest
    is what `vector_digits` gives.
    """
    # 1. The eight codes of each word, in two words of four bytes: what a and b of x meet.
    if GROUP:
        a, b = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    else:
        a, b = words.to(tl.int32), (words >> 32).to(tl.int32)
    # 2. Their products with the two digits, as whole numbers: below 8 · 128 · MAX_STEPS < 2**31.
    zero = tl.zeros([ROWS, WORDS], tl.int32)
    y_low = _dp4a(b, b_low[None, :], _dp4a(a, a_low[None, :], zero))
    y_high = _dp4a(b, b_high[None, :], _dp4a(a, a_high[None, :], zero))
    y = y_high * 256 + y_low  # [ROWS, WORDS]
    # 3. As floats, with their scales.
    if GROUP:
        y = tl.sum(tl.reshape(y, [ROWS, WORDS // 4, 4]), 2).to(tl.float32)  # 32 codes, which have one scale
        return tl.sum(y * (scale.to(tl.float32) * step) + total[None, :] * offset.to(tl.float32), 1)
    else:
        return tl.sum(y.to(tl.float32), 1) * (scale * step)
