"""A vector times rows of codes, and no code becomes a float: what `quantized_row.py` computes with. Part 17.

Each code is used once, so there is no time to make it a float: the vector gets codes instead, in two digits
of eight bits each, and whole numbers are multiplied, four codes in one instruction (dp4a). No number is wrong
by more than 1/64,000 of the vector's largest.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # there is no processor with that instruction
MOST = tl.constexpr(126 * 2**8)  # of the last digit's steps, on either side of 0


@triton.jit
def place(k, K: tl.constexpr):
    """Where number k of a vector of K lies between two kernels: all 8i first, then all 8i + 1, and so on. So
    a thread with words of a row, eight codes each, finds its numbers side by side.
    """
    return k % 8 * (K // 8) + k // 8


@triton.jit
def eight(x, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """x[K], in `place`s -> the numbers 8i, 8i + 1, ... of it, [WORDS] each. A thread reads as many of each
    as it has words side by side, 16 bytes of them.
    """
    i = tl.max_contiguous(tl.arange(0, WORDS), 4 if GROUP else 2)
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
def split(x, K: tl.constexpr, WORDS: tl.constexpr):
    """The same of an x[K] that lies as usual: attention's result."""
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
    """c + Σ a · b over the four bytes of each: whole numbers with a sign."""
    if INTERPRETED:
        for shift in tl.static_range(0, 32, 8):
            c += ((a << shift) >> 24) * ((b << shift) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _digits(a, b, c, d, steps):
    """Four numbers, `steps` to 1 -> two words: each number's last digit, and the one before. A digit is -128
    to 127; they count 1 and 256 steps.
    """
    # A float between 2**23 and 2**24 is a whole number, and its last bits are that number. With 128 for each
    # digit, none is negative.
    a = (a * steps + 1.5 * 2**23).to(tl.int32, bitcast=True) - 0x4B400000 + 0x8080
    b = (b * steps + 1.5 * 2**23).to(tl.int32, bitcast=True) - 0x4B400000 + 0x8080
    c = (c * steps + 1.5 * 2**23).to(tl.int32, bitcast=True) - 0x4B400000 + 0x8080
    d = (d * steps + 1.5 * 2**23).to(tl.int32, bitcast=True) - 0x4B400000 + 0x8080
    return _together(a, b, c, d, 0), _together(a, b, c, d, 8)


@triton.jit
def _together(a, b, c, d, shift: tl.constexpr):
    """A digit of each in one word, the 128 taken off: that turns a byte's highest bit."""
    a, b, c, d = (a >> shift) & 255, (b >> shift) & 255, (c >> shift) & 255, (d >> shift) & 255
    return (a | (b << 8) | (c << 16) | (d << 24)) ^ -0x7F7F7F80


@triton.jit
def whole(x0, x1, x2, x3, x4, x5, x6, x7, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """The vector as digits: two words for the first four codes of a word of codes (int4: for its even ones),
    two for the others; what a step stands for; and with groups the sum of x for each four words.
    """
    low = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    high = tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7)))
    largest = tl.maximum(tl.max(tl.maximum(low, high), 0), 1e-30)
    steps = MOST / largest
    if GROUP:
        a0, a1 = _digits(x0, x2, x4, x6, steps)
        b0, b1 = _digits(x1, x3, x5, x7, steps)
        total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
        total = tl.sum(tl.reshape(total, [WORDS // 4, 4]), 1)
    else:
        a0, a1 = _digits(x0, x1, x2, x3, steps)
        b0, b1 = _digits(x4, x5, x6, x7, steps)
        total = x0  # not read
    return a0, a1, b0, b1, largest / MOST, total


@triton.jit
def dot(
    w, s, least, a0, a1, b0, b1, unit, total,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Σ x · weight: [ROWS]."""
    if GROUP:
        a, b = w & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F
    else:
        a, b = w.to(tl.int32), (w >> 32).to(tl.int32)
    zero = tl.zeros([ROWS, WORDS], tl.int32)
    y0 = _dp4a(b, b0[None, :], _dp4a(a, a0[None, :], zero))
    y1 = _dp4a(b, b1[None, :], _dp4a(a, a1[None, :], zero))
    y = y1 * 256 + y0  # of eight codes: less than 8 · 128 · MOST < 2**31
    if GROUP:
        y = tl.sum(tl.reshape(y, [ROWS, WORDS // 4, 4]), 2).to(tl.float32)  # of 32 codes with one scale
        return tl.sum(y * (s.to(tl.float32) * unit) + total[None, :] * least.to(tl.float32), 1)
    else:
        return tl.sum(y.to(tl.float32), 1) * (s * unit)
