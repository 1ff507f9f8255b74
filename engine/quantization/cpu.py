"""Products over codes on a CPU. Part 17.

Promises the products of products.py: of int8 weights, where activations stay as they are, up to 1/7,000 of a
row's largest number; the others up to rounding.

Which kernel computes a layer is a function of the processor, of whether there is a C compiler, and of the
layer's shape and dtype. No clock is asked: no two kernels give the same bits, and a seed's text would change
from one process to the next. Int8 weights are multiplied by our own C where there is a compiler and the
instruction (int8_rows.py), else by FBGEMM on x86 (fbgemm.py). With both a row's result is a function of that
row: the same bits alone and beside others, with any number of rows and threads. Where there is neither, and
where the codes are read where they lie, PyTorch multiplies, and its sums may depend on the number of rows.

So with C or FBGEMM all processes on one machine give a seed the same text, if they have the same requests in
the same steps. Other company, or drafts, change the order of sums in attention: by 1e-7, and a code of an
activation may then be the next one. That is 3e-5 of a row's largest number with int8 (96 of 96 seeded texts
of 60 tokens were the same alone and in a crowd, with drafts and without), 8e-3 with int8_dynamic (87 of 96).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization import fbgemm, int8_rows
from engine.quantization.codes import unpack_nibbles
from engine.quantization.packed import Packed
from engine.quantization.products import linear_of_codes, quantize_activations

SMALLEST = 1e-30  # instead of a row's largest number, where that is 0
ATEN = torch.bfloat16  # what PyTorch's kernels over codes are quick in; in fp32 they are the slowest by far
PIECE = 2**18  # weights that become numbers at a time: these stay in the processor's cache


def activation_steps() -> int:
    """The largest code of an activation."""
    return int8_rows.MOST if int8_rows.is_here() else fbgemm.activation_steps()


def of_codes(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product with activations as int8 codes, a scale for each
    row.
    """
    if int8_rows.takes(codes):
        return int8_rows.linear(codes, scale, bias)
    if fbgemm.is_here():
        return _one_digit(codes, scale, bias.float())
    most, bias = fbgemm.activation_steps(), bias.float()
    return Packed(
        lambda x: linear_of_codes(*quantize_activations(x, most), codes, scale, bias).to(x.dtype), 0
    )


def _one_digit(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    multiply = fbgemm.int8_product(codes, fbgemm.activation_steps())

    def product(x: Tensor) -> Tensor:
        largest = _largest(x)
        return torch.addcmul(bias, multiply(x, largest).mul_(scale), largest).to(x.dtype)

    return Packed(product, codes.numel())


def by_rows(codes: Tensor, scale: Tensor, bias: Tensor, own_layout: bool = True) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product with activations as they are. Without
    `own_layout`, `codes` are read where they lie.
    """
    if own_layout and int8_rows.takes(codes):
        return int8_rows.linear(codes, scale, bias, digits=2)
    if own_layout and fbgemm.is_here():
        return _two_digits(codes, scale, bias.float())
    return (_aten_by_rows if bias.dtype is ATEN else _by_pieces)(codes, scale, bias)


def _by_pieces(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """So many rows of codes become numbers, and are multiplied; in fp32, as products.py says."""
    pieces = list(_pieces(*codes.shape))

    def product(x: Tensor) -> Tensor:
        wide = x.float()
        sums = [wide @ codes[piece].float().T for piece in pieces]
        return (torch.cat(sums, 1) if len(sums) > 1 else sums[0]).mul_(scale).add_(bias).to(x.dtype)

    return Packed(product, 0)


def _two_digits(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """x ≈ (high + low / 2·most) · largest / most: the second digit counts what the first one left. Both are
    rows of one product of whole numbers, so the weights are read once.
    """
    most = fbgemm.activation_steps()
    multiply = fbgemm.int8_product(codes, most)

    def product(x: Tensor) -> Tensor:
        T, largest = len(x), _largest(x)
        exact = (x / largest).mul_(most)  # -most to most
        high = exact.round()
        digits = torch.cat([high, exact.sub_(high).mul_(2 * most)])  # [2T, K]
        sums = multiply(digits, most)
        total = sums[:T].add_(sums[T:], alpha=1 / (2 * most)).mul_(scale)
        return torch.addcmul(bias, total, largest).to(x.dtype)

    return Packed(product, codes.numel())


def _aten_by_rows(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    scale = scale.to(bias.dtype)
    return Packed(lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale).add_(bias), 0)


def by_groups(packed: Tensor, K: int, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """packed[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> the product."""
    full = scale.shape[1] * group_size  # the last group is filled up: x is 0 there
    if missing := full // 2 - packed.shape[1]:  # `pad` copies, whatever is missing
        packed = F.pad(packed, (0, missing))
    fits = bias.dtype is ATEN and len(packed) % 16 == 0
    kernel = _aten_by_groups if fits else _halves
    best = kernel(packed, scale, low, bias, group_size)
    if full == K:
        return best
    own_bytes = best.own_bytes or (_bytes(packed, scale, low) if missing else 0)
    return Packed(lambda x: best.product(F.pad(x, (0, full - K))), own_bytes)


def _halves(packed: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """The even numbers of x meet the lower halves of the bytes, the odd ones the upper: no code is moved."""
    N, half = packed.shape
    pieces = list(_pieces(N, 2 * half))

    def numbers(codes: Tensor, piece: slice) -> Tensor:
        """codes[n, K / 2] of these rows, as weights."""
        groups = codes.view(len(codes), -1, group_size // 2).to(bias.dtype)
        return groups.mul_(scale[piece, :, None]).add_(low[piece, :, None]).view(len(codes), half)

    def product(x: Tensor) -> Tensor:
        even, odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()  # [T, K / 2]
        sums = [
            torch.addmm(
                even @ numbers(packed[piece] & 15, piece).T, odd, numbers(packed[piece] >> 4, piece).T
            )
            for piece in pieces
        ]
        return (torch.cat(sums, 1) if len(sums) > 1 else sums[0]).add_(bias)

    return Packed(product, 0)


def _aten_by_groups(packed: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """PyTorch counts codes from 8: weight = (code - 8) · scale + zero."""
    codes = unpack_nibbles(packed, 2 * packed.shape[1]).int()
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale, low = scale.T.to(bias.dtype), low.T.to(bias.dtype)
    both = torch.stack([scale, low + 8 * scale], 2).contiguous()  # [groups, N, 2]
    return Packed(
        lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, both).add_(bias),
        _bytes(weight, both),
    )


def _largest(x: Tensor) -> Tensor:
    """x[T, K] -> the largest magnitude of each row, [T, 1] in fp32."""
    return x.abs().amax(1, keepdim=True).float().clamp_(min=SMALLEST)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _pieces(N: int, K: int) -> Iterator[slice]:
    """Rows of codes[N, K] that are taken at a time."""
    rows = max(1, PIECE // K)
    return (slice(start, start + rows) for start in range(0, N, rows))
