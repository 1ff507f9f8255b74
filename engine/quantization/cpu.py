"""Products over codes on a CPU. Part 17.

Promises the products of products.py: of int8 weights, where activations stay as they are, up to 1/7,000 of a
row's largest number; the others up to rounding.

Which kernel computes a layer depends on the processor, on whether there is a C compiler, and on the layer's
shape and dtype, and not on a measurement: no two kernels give the same bits, so a seed's text would change
from one process to the next. Int8 weights are multiplied by our own C where there is a compiler and the
instruction (int8_rows.py), else by FBGEMM on x86 (fbgemm.py). With both a row's result is a function of that
row: the same bits alone and beside others, with any number of rows and threads. Where there is neither, and
where the codes are read where they lie, PyTorch multiplies, and its sums may depend on the number of rows.

So with C or FBGEMM all processes on one machine give a seed the same text, if they have the same requests in
the same steps. Other requests beside it, or drafts, change the order of sums in attention. That changes a
number by 1e-7 of its size, and an activation near the border of two codes then gets the other one: a change
of 3e-5 of a row's largest number with int8 (96 of 96 seeded texts of 60 tokens were the same alone and among
others, with drafts and without), of 8e-3 with int8_dynamic (87 of 96).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization import fbgemm, int8_rows
from engine.quantization.codes import unpack_nibbles
from engine.quantization.packed import Packed
from engine.quantization.products import linear_of_codes, quantize_activations

MIN_LARGEST = 1e-30  # of a row's numbers: a row of zeros is divided by it
ATEN_DTYPE = torch.bfloat16  # in which PyTorch's kernels over codes are fast; in fp32 all others are faster
PIECE = 2**18  # weights that are made from their codes at a time: they stay in the processor's cache


def max_activation_level() -> int:
    """The largest code of an activation: codes are from -this to this."""
    return int8_rows.MAX_LEVEL if int8_rows.is_available() else fbgemm.max_activation_level()


def of_codes(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product with x[T, K] made int8 codes, with a scale for
    each row.
    """
    if int8_rows.supports(codes):
        return int8_rows.pack(codes, scale, bias)
    if fbgemm.is_available():
        return _one_digit(codes, scale, bias.float())
    bias = bias.float()
    max_level = fbgemm.max_activation_level()
    return Packed(
        lambda x: linear_of_codes(*quantize_activations(x, max_level), codes, scale, bias).to(x.dtype), 0
    )


def _one_digit(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """As `of_codes`, by FBGEMM."""
    multiply = fbgemm.int8_product(codes, fbgemm.max_activation_level())

    def product(x: Tensor) -> Tensor:
        largest = _largest(x)  # [T, 1]
        return torch.addcmul(bias, multiply(x, largest).mul_(scale), largest).to(x.dtype)

    return Packed(product, codes.numel())


def by_rows(codes: Tensor, scale: Tensor, bias: Tensor, own_layout: bool = True) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product with x[T, K] as it is. `own_layout`: the product
    may hold a copy of the codes in a faster kernel's layout; else it reads `codes` themselves.
    """
    if own_layout and int8_rows.supports(codes):
        return int8_rows.pack(codes, scale, bias, digits=2)
    if own_layout and fbgemm.is_available():
        return _two_digits(codes, scale, bias.float())
    if bias.dtype is ATEN_DTYPE:
        return _aten_by_rows(codes, scale, bias)
    return _by_pieces(codes, scale, bias)


def _by_pieces(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """A piece of the codes is made fp32 and multiplied, then the next; in fp32, as in products.py."""
    pieces = list(_pieces(*codes.shape))

    def product(x: Tensor) -> Tensor:
        rows = x.float()  # [T, K]
        sums = _join([rows @ codes[piece].float().T for piece in pieces])  # [T, N]
        return sums.mul_(scale).add_(bias).to(x.dtype)

    return Packed(product, 0)


def _two_digits(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """x ≈ (high + low / 2·max_level) · largest / max_level: the second digit, low, is the rounding error of
    the first. Both are rows of one product of whole numbers, so the weights are read once.
    """
    max_level = fbgemm.max_activation_level()
    multiply = fbgemm.int8_product(codes, max_level)

    def product(x: Tensor) -> Tensor:
        T, largest = len(x), _largest(x)
        exact = (x / largest).mul_(max_level)  # [T, K]: -max_level to max_level
        high = exact.round()
        low = exact.sub_(high).mul_(2 * max_level)  # `multiply` rounds it
        sums = multiply(torch.cat([high, low]), max_level)  # [2T, N]
        total = sums[:T].add_(sums[T:], alpha=1 / (2 * max_level)).mul_(scale)
        return torch.addcmul(bias, total, largest).to(x.dtype)

    return Packed(product, codes.numel())


def _aten_by_rows(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """By PyTorch's kernel over int8 codes, which reads them as they are."""
    scale = scale.to(bias.dtype)
    return Packed(lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale).add_(bias), 0)


def by_groups(packed: Tensor, K: int, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """packed[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> the product with x[T, K]."""
    padded_K = scale.shape[1] * group_size  # whole groups: x is 0 in what is added to the last one
    missing_bytes = padded_K // 2 - packed.shape[1]  # of each row
    if missing_bytes:  # else `pad` would copy all the same
        packed = F.pad(packed, (0, missing_bytes))
    aten_fits = bias.dtype is ATEN_DTYPE and len(packed) % 16 == 0  # its kernel wants N in sixteens
    kernel = _aten_by_groups if aten_fits else _halves
    padded = kernel(packed, scale, low, bias, group_size)
    if padded_K == K:
        return padded
    own_bytes = padded.own_bytes
    if missing_bytes and not own_bytes:  # the kernel reads our copy
        own_bytes = _bytes(packed, scale, low)
    return Packed(lambda x: padded.product(F.pad(x, (0, padded_K - K))), own_bytes)


def _halves(packed: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """The even numbers of x are multiplied by the lower halves of the bytes, the odd ones by the upper
    halves: so the codes stay in their order.
    """
    N, half_K = packed.shape
    pieces = list(_pieces(N, 2 * half_K))

    def weights(codes: Tensor, piece: slice) -> Tensor:
        """codes[n, K / 2] of the rows `piece` -> the weights that they stand for."""
        groups = codes.view(len(codes), -1, group_size // 2).to(bias.dtype)  # [n, groups, group_size / 2]
        return groups.mul_(scale[piece, :, None]).add_(low[piece, :, None]).view(len(codes), half_K)

    def sums_of(even: Tensor, odd: Tensor, piece: slice) -> Tensor:
        """even and odd[T, K / 2] -> [T, n]"""
        even_sums = even @ weights(packed[piece] & 15, piece).T
        return torch.addmm(even_sums, odd, weights(packed[piece] >> 4, piece).T)

    def product(x: Tensor) -> Tensor:
        even, odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()  # [T, K / 2] each
        return _join([sums_of(even, odd, piece) for piece in pieces]).add_(bias)

    return Packed(product, 0)


def _aten_by_groups(packed: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """By PyTorch's kernel over four-bit codes. It has weight = (code - 8) · scale + zero, so zero = low + 8 ·
    scale.
    """
    codes = unpack_nibbles(packed, 2 * packed.shape[1]).int()
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale, low = scale.T.to(bias.dtype), low.T.to(bias.dtype)
    scale_and_zero = torch.stack([scale, low + 8 * scale], 2).contiguous()  # [groups, N, 2]

    def product(x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scale_and_zero).add_(bias)

    return Packed(product, _bytes(weight, scale_and_zero))


def _join(columns: list[Tensor]) -> Tensor:
    """The columns[T, n] side by side, [T, N]; a single one as it is, since `cat` would copy it."""
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]


def _largest(x: Tensor) -> Tensor:
    """x[T, K] -> the largest magnitude of each row, [T, 1] in fp32; at least MIN_LARGEST."""
    return x.abs().amax(1, keepdim=True).float().clamp_(min=MIN_LARGEST)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _pieces(N: int, K: int) -> Iterator[slice]:
    """Which rows of codes[N, K] are taken at a time, about PIECE weights."""
    rows = max(1, PIECE // K)
    return (slice(start, start + rows) for start in range(0, N, rows))
