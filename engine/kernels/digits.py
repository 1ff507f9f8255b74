"""A vector times rows of codes in whole numbers: what `quantized_row.py` computes with. Part 17.

Each code is used once, so making it a float would cost more than the product. Instead the vector is rounded
to whole numbers of 16 bits, each two digits of eight bits: number = (256 · high + low) · step. Digits are
multiplied by codes, four in one instruction (dp4a). A number of the vector is wrong by at most 1/64,000 of
the largest. Words of codes are eight neighbours of a row each: 64 bits in int8, 32 in int4.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # no processor then has the instruction dp4a
MAX_STEPS = tl.constexpr(126 * 2**8)  # of the vector's largest number: both digits stay within -128 to 127
# A float between 2**23 and 2**24 is a whole number, and its last bits are that number. So adding ROUNDER to a
# smaller float rounds it, and subtracting ROUNDER's own bits leaves the whole number.
ROUNDER = tl.constexpr(1.5 * 2**23)
ROUNDER_BITS = tl.constexpr(0x4B400000)
TWO_OFFSETS = tl.constexpr(0x8080)  # 128 for each of a number's two digits, so that none is negative
HIGHEST_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080 in 32 bits with a sign: the highest bit of four bytes


@triton.jit
def strided_index(k, K: tl.constexpr):
    """Where number k of a *strided* vector lies: all numbers 8i first, then all 8i + 1, and so on, as [8,
    K/8]. Between two kernels a vector lies so: a thread that has words of a row side by side, eight codes
    each, finds the numbers for their first codes side by side, those for their second codes, and so on.
    """
    return k % 8 * (K // 8) + k // 8


@triton.jit
def load_strided(x, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """A strided x[K] -> its numbers 8i, its numbers 8i + 1, ... 8i + 7, [WORDS] each; 0 beyond K. A thread
    reads as many of each as it has words side by side, 16 bytes of them: 4 in int4, 2 in int8 (GROUP 0).
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
    """As `load_strided`, of an x[K] in the usual order: attention's result."""
    k = tl.arange(0, 8 * WORDS)
    numbers = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
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
    if INTERPRETED:
        for shift in tl.static_range(0, 32, 8):
            c += ((a << shift) >> 24) * ((b << shift) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _to_digits(a, b, c, d, steps):
    """Four vectors of numbers, `steps` steps to 1 -> two words each: of low digits and of high digits. A
    digit is -128 to 127; a low one counts 1 step, a high one 256.
    """
    a = (a * steps + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    b = (b * steps + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    c = (c * steps + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    d = (d * steps + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS + TWO_OFFSETS
    return _pack_digits(a, b, c, d, 0), _pack_digits(a, b, c, d, 8)


@triton.jit
def _pack_digits(a, b, c, d, shift: tl.constexpr):
    """A digit of each in one word, less its offset of 128: that flips a byte's highest bit."""
    a, b, c, d = (a >> shift) & 255, (b >> shift) & 255, (c >> shift) & 255, (d >> shift) & 255
    return (a | (b << 8) | (c << 16) | (d << 24)) ^ HIGHEST_BITS


@triton.jit
def vector_digits(x0, x1, x2, x3, x4, x5, x6, x7, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """The vector as digits, from what `load_strided` gives: words[WORDS] of low and of high digits, a for the
    first four codes of a word of codes (int4: for its even ones), b for the others; what a step stands for;
    and in int4 the sum of x for each four words, [WORDS / 4].
    """
    low = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    high = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    largest = tl.maximum(tl.max(tl.maximum(low, high), 0), 1e-30)
    steps = MAX_STEPS / largest
    if GROUP:
        a_low, a_high = _to_digits(x0, x2, x4, x6, steps)
        b_low, b_high = _to_digits(x1, x3, x5, x7, steps)
        total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
        total = tl.sum(tl.reshape(total, [WORDS // 4, 4]), 1)
    else:
        a_low, a_high = _to_digits(x0, x1, x2, x3, steps)
        b_low, b_high = _to_digits(x4, x5, x6, x7, steps)
        total = x0  # not read
    return a_low, a_high, b_low, b_high, largest / MAX_STEPS, total


@triton.jit
def dot(
    words, scale, low, a_low, a_high, b_low, b_high, step, total,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Σ x · weight of each row: [ROWS]. `words`[ROWS, WORDS] of codes; int8: `scale`[ROWS]; int4: `scale` and
    `low`[ROWS, WORDS / 4]. The rest is what `vector_digits` gives.
    """
    # 1. The eight codes of each word, in two words of four bytes.
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
        y = tl.sum(tl.reshape(y, [ROWS, WORDS // 4, 4]), 2).to(tl.float32)  # of 32 codes with one scale
        return tl.sum(y * (scale.to(tl.float32) * step) + total[None, :] * low.to(tl.float32), 1)
    else:
        return tl.sum(y.to(tl.float32), 1) * (scale * step)
