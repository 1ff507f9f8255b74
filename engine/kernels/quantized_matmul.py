"""Linear layers whose weights are codes, in Triton: codes become numbers in registers only. Part 17.

Promises the products of engine/quantization/products.py up to rounding. Sums are in fp32. The kernels are for
the few rows of a decode step; engine/quantization/gpu.py computes the many rows of a prompt in another way.

For one row of x, a program multiplies x by a few rows of W and reads each row once, in wide loads. Several
rows of x are multiplied by a tile of W, on tensor cores if x has 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.flash_prefill import MIN_DOT_SIZE

TILE_COLS = 32  # rows of W, and so columns of the result, for a program that multiplies several rows of x


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x[T, K], codes[N, K] in int8, scale[N] and bias[N] -> [T, N] in the dtype of x.

    Each program takes all T rows, so T must be small (at most 64 in engine/quantization/gpu.py).
    """
    (T, K), N = x.shape, len(codes)
    x, out = x.contiguous(), torch.empty(T, N, device=x.device, dtype=x.dtype)
    if T == 1:
        rows = 4 if N >= 4096 else 2  # rows of W for a program, which has as many warps
        inner = min(triton.next_power_of_2(K), 1024)  # numbers of a row that it takes at a time
        _int8_row[(triton.cdiv(N, rows),)](
            x, codes, scale, bias, out, N=N, K=K, ROWS=rows, INNER=inner, num_warps=rows
        )
    elif T > 1:
        padded_rows = max(MIN_DOT_SIZE, triton.next_power_of_2(T))
        _int8_tile[(triton.cdiv(N, TILE_COLS),)](
            x, codes, scale, bias, out, T,
            N=N, K=K, ROWS=padded_rows, COLS=TILE_COLS, INNER=128, num_warps=4,
        )  # fmt: skip
    return out


def int4_linear(
    x: Tensor, nibbles: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int
) -> Tensor:
    """x[T, K], nibbles[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> [T, N] in the dtype of x.

    `group_size`: weights in a group, 32, 64 or 128. Each program takes all T rows, so T must be small.
    """
    (T, K), N = x.shape, len(nibbles)
    x, out = x.contiguous(), torch.empty(T, N, device=x.device, dtype=x.dtype)
    shape = {"N": N, "K": K, "GROUP": group_size}
    if T == 1:
        rows = 4  # rows of W for a program, which has as many warps
        groups = min(triton.next_power_of_2(scale.shape[1]), 1024 // group_size)  # that it takes at a time
        _int4_row[(triton.cdiv(N, rows),)](
            x, nibbles, scale, low, bias, out, **shape, ROWS=rows, GROUPS=groups, num_warps=rows
        )
    elif T > 1:
        padded_rows = max(MIN_DOT_SIZE, triton.next_power_of_2(T))
        _int4_tile[(triton.cdiv(N, TILE_COLS),)](
            x, nibbles, scale, low, bias, out, T, **shape, ROWS=padded_rows, COLS=TILE_COLS, num_warps=4
        )
    return out


@triton.jit
def _int8_row(
    x, codes, scale, bias, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Program p: out[n] = (Σ x[k] · codes[n, k]) · scale[n] + bias[n] for ROWS rows n of W, from p · ROWS on.

    x[K], codes[N, K] in int8, scale[N], bias[N], out[N]. INNER numbers of each row are taken at a time, and
    their products are added in fp32; the result has the dtype of out. The last slice of a row may be shorter,
    and the last program may have fewer rows: what lies behind a row's end does not count, and nothing is
    written behind out[N - 1].
    """
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, INNER)
    codes += row[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros([ROWS, INNER], tl.float32)
    for start in range(0, K, INNER):
        inside = start + k < K
        code = tl.load(codes + start, mask=(row < N)[:, None] & inside[None, :], other=0)
        number = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        total += code.to(tl.float32) * number[None, :]
    scales = tl.load(scale + row, mask=row < N, other=0.0)
    biases = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total, 1) * scales + biases).to(out.dtype.element_ty), mask=row < N)


@triton.jit
def _int4_row(
    x, nibbles, scale, low, bias, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows of W): as `_int8_row`, with GROUPS groups of each row at a time.

    For each group the program computes the sum of x · code, which is multiplied by the group's scale, and the
    sum of x, which is multiplied by the group's low.
    """
    HALF: tl.constexpr = GROUP // 2
    BYTES: tl.constexpr = (K + 1) // 2
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUPS)
    byte = group[:, None] * HALF + tl.arange(0, HALF)[None, :]  # [GROUPS, HALF]
    total = tl.zeros([ROWS, GROUPS], tl.float32)
    for start in range(0, NUM_GROUPS, GROUPS):
        row_byte = start * HALF + byte  # [GROUPS, HALF]: the byte's index in its row
        even = tl.load(x + 2 * row_byte, mask=2 * row_byte < K, other=0.0).to(tl.float32)
        odd = tl.load(x + 2 * row_byte + 1, mask=2 * row_byte + 1 < K, other=0.0).to(tl.float32)
        pair = tl.load(
            nibbles + row[:, None, None].to(tl.int64) * BYTES + row_byte[None, :, :],
            mask=(row < N)[:, None, None] & (row_byte < BYTES)[None, :, :],
            other=0,
        )  # [ROWS, GROUPS, HALF]: two codes each
        sums = tl.sum((pair & 15).to(tl.float32) * even[None, :, :], 2)
        sums += tl.sum((pair >> 4).to(tl.float32) * odd[None, :, :], 2)  # [ROWS, GROUPS]
        index = row[:, None].to(tl.int64) * NUM_GROUPS + start + group[None, :]  # [ROWS, GROUPS]
        valid = (row < N)[:, None] & (start + group < NUM_GROUPS)[None, :]
        scales = tl.load(scale + index, mask=valid, other=0.0).to(tl.float32)
        lows = tl.load(low + index, mask=valid, other=0.0).to(tl.float32)
        total += sums * scales + tl.sum(even + odd, 1)[None, :] * lows
    biases = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total, 1) + biases).to(out.dtype.element_ty), mask=row < N)


@triton.jit
def _int8_tile(
    x, codes, scale, bias, out, T,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Program (COLS rows of W): out[T, N] = (x[T, K] · codes[N, K]ᵀ) · scale[N] + bias[N], for all T rows."""
    x_row, col = tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, INNER)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, INNER):
        inside = start + k < K
        x_tile = tl.load(
            x + x_row[:, None] * K + start + k[None, :],
            mask=(x_row < T)[:, None] & inside[None, :],
            other=0.0,
        )
        code = tl.load(
            codes + col[None, :].to(tl.int64) * K + start + k[:, None],
            mask=(col < N)[None, :] & inside[:, None],
            other=0,
        )
        total = tl.dot(x_tile, code.to(x_tile.dtype), total, input_precision="ieee")
    scales = tl.load(scale + col, mask=col < N, other=0.0)
    biases = tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
    result = (total * scales[None, :] + biases[None, :]).to(out.dtype.element_ty)
    tl.store(out + x_row[:, None] * N + col[None, :], result, mask=(x_row < T)[:, None] & (col < N)[None, :])


@triton.jit
def _int4_tile(
    x, nibbles, scale, low, bias, out, T,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (COLS rows of W): as `_int8_tile`, one group after the other.

    The even columns of x are multiplied by the lower halves of the bytes, and the odd columns by the upper
    halves. Every dtype of x holds codes exactly. The sums are multiplied by scale and low in fp32.
    """
    HALF: tl.constexpr = GROUP // 2
    BYTES: tl.constexpr = (K + 1) // 2
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    x_row, col = tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for group in range(NUM_GROUPS):
        byte = group * HALF + tl.arange(0, HALF)  # [HALF]
        even_ptr = x + x_row[:, None] * K + 2 * byte[None, :]  # [ROWS, HALF]
        even = tl.load(even_ptr, mask=(x_row < T)[:, None] & (2 * byte < K)[None, :], other=0.0)
        odd = tl.load(even_ptr + 1, mask=(x_row < T)[:, None] & (2 * byte + 1 < K)[None, :], other=0.0)
        pair = tl.load(
            nibbles + col[None, :].to(tl.int64) * BYTES + byte[:, None],
            mask=(col < N)[None, :] & (byte < BYTES)[:, None],
            other=0,
        )  # [HALF, COLS]: two codes each
        sums = tl.dot(even, (pair & 15).to(even.dtype), input_precision="ieee")
        sums = tl.dot(odd, (pair >> 4).to(even.dtype), sums, input_precision="ieee")  # [ROWS, COLS]
        index = col.to(tl.int64) * NUM_GROUPS + group  # [COLS]
        scales = tl.load(scale + index, mask=col < N, other=0.0).to(tl.float32)
        lows = tl.load(low + index, mask=col < N, other=0.0).to(tl.float32)
        total += sums * scales[None, :]
        x_sum = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)  # [ROWS]: the group's sum of x
        total += x_sum[:, None] * lows[None, :]
    biases = tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
    result = (total + biases[None, :]).to(out.dtype.element_ty)
    tl.store(out + x_row[:, None] * N + col[None, :], result, mask=(x_row < T)[:, None] & (col < N)[None, :])
