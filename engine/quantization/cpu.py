"""Products over codes on a CPU. Part 17.

Promises the products of products.py. Method "int8" may change each number of x, since x becomes two digits
(`_two_digits`): by up to 1/64,516 of the row's largest number with levels up to 127, and by up to 1/15,876
with levels up to 63 (`max_activation_level`). The other methods differ by rounding only.

The kernel of a layer depends on the processor, on whether there is a C compiler, and on the layer's shape and
dtype. The kernel is not chosen by measuring: no two kernels give the same bits, so a seed's text would change
from one process to the next.

Int8 weights are multiplied by our C code (int8_rows.py) if there is a compiler and the processor has the
instruction, and otherwise by FBGEMM on x86 (fbgemm.py). With either, a row's result depends on that row only:
the bits are the same for any number of rows and threads. PyTorch multiplies if neither can be used, or if the
kernel must read the layer's own codes. PyTorch's sums may depend on the number of rows.

So with C or FBGEMM all processes on one machine give a seed the same text, if the same requests are in the
same steps. Other requests in a step, or drafts, change the order of sums in attention, and with it the last
bits of an activation, which may then get the next code. With int8_dynamic that may change a seed's text. With
int8 this is less likely, since a step from code to code is some hundred times smaller.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization import fbgemm, int8_rows
from engine.quantization.codes import unpack_nibbles
from engine.quantization.packed import Packed
from engine.quantization.products import linear_of_codes, quantize_activations

MIN_LARGEST = 1e-30  # the least divisor of a row, so that a row of zeros is not divided by 0
ATEN_DTYPE = torch.bfloat16  # PyTorch's kernels over codes are fast in bf16; in fp32 all others are faster
PIECE = 2**18  # weights that are made from codes at a time, few enough for the processor's cache


def max_activation_level() -> int:
    """The largest level of an activation, 127 or 63. Levels lie between minus this number and this number."""
    return int8_rows.MAX_LEVEL if int8_rows.is_available() else fbgemm.max_activation_level()


def pack_int8_dynamic(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product of method "int8_dynamic": x[T, K] becomes int8
    codes with one scale for each row, and whole numbers are multiplied.
    """
    bias = bias.float()
    if int8_rows.supports(codes):
        return int8_rows.pack(codes, scale, bias)
    if fbgemm.is_available():
        return _one_digit(codes, scale, bias)
    max_level = fbgemm.max_activation_level()

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        x_codes, x_scale = quantize_activations(x, max_level)
        return linear_of_codes(x_codes, x_scale, codes, scale, bias).to(x.dtype)

    return Packed(product)


def _one_digit(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """`pack_int8_dynamic` computed by FBGEMM: x ≈ digit · largest / max_level, where `largest` is the largest
    magnitude of the row.
    """
    multiply = fbgemm.scaled_product(codes, fbgemm.max_activation_level())

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        largest = _largest(x)  # [T, 1]
        # `multiply` gives Σ x / largest · code. Times `largest` this is Σ x · code.
        return torch.addcmul(bias, multiply(x, largest).mul_(scale), largest).to(x.dtype)

    return Packed(product, codes.numel())


def pack_int8(codes: Tensor, scale: Tensor, bias: Tensor, may_repack: bool = True) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product of method "int8" with x[T, K]. A number of x is
    rounded to two digits (`_two_digits`) at most, and never to a single code.

    `may_repack`: whether the product may hold a copy of the codes in the layout of a faster kernel. If False,
    the product reads `codes`.
    """
    if may_repack and int8_rows.supports(codes):
        return int8_rows.pack(codes, scale, bias, digits=2)
    if may_repack and fbgemm.is_available():
        return _two_digits(codes, scale, bias.float())
    if bias.dtype is ATEN_DTYPE:
        return _aten_by_rows(codes, scale, bias)
    return _by_pieces(codes, scale, bias)


def _by_pieces(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """`pack_int8` in fp32, as products.py computes. The codes become fp32 in pieces that fit the cache."""
    N, K = codes.shape
    pieces = _pieces(N, K)

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        rows = x.float()  # [T, K]
        sums = _join([rows @ codes[piece].float().T for piece in pieces])  # [T, N]
        return sums.mul_(scale).add_(bias).to(x.dtype)

    return Packed(product)


def _two_digits(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """`pack_int8` computed by FBGEMM, with two digits for each number of x.

    x ≈ (coarse + fine / (2 · max_level)) · largest / max_level. The digit `coarse` is x as a level, and the
    digit `fine` is the rounding error of `coarse`. The digits of a row are two rows of one product of whole
    numbers, so the weights are read once.
    """
    max_level = fbgemm.max_activation_level()
    multiply = fbgemm.scaled_product(codes, max_level)

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        T, largest = len(x), _largest(x)
        exact = (x / largest).mul_(max_level)  # [T, K]: -max_level to max_level
        coarse = exact.round()
        fine = exact.sub_(coarse).mul_(2 * max_level)  # `multiply` rounds to whole numbers
        sums = multiply(torch.cat([coarse, fine]), max_level)  # [2T, N]: Σ digit · code / max_level
        total = sums[:T].add_(sums[T:], alpha=1 / (2 * max_level)).mul_(scale)
        return torch.addcmul(bias, total, largest).to(x.dtype)

    return Packed(product, codes.numel())


def _aten_by_rows(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """`pack_int8` computed by PyTorch's kernel over int8 codes, which reads `codes` without a copy."""
    scale = scale.to(bias.dtype)

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return torch.ops.aten._weight_int8pack_mm(x, codes, scale).add_(bias)

    return Packed(product)


def pack_int4(nibbles: Tensor, K: int, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """nibbles[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> the product of "int4" with x[T, K]."""
    padded_K = scale.shape[1] * group_size  # K rounded up to whole groups; x is padded with zeros
    missing_bytes = padded_K // 2 - nibbles.shape[1]  # of each row
    if missing_bytes:
        nibbles = F.pad(nibbles, (0, missing_bytes))
    aten_fits = bias.dtype is ATEN_DTYPE and len(nibbles) % 16 == 0  # PyTorch's kernel needs N in sixteens
    kernel = _aten_by_groups if aten_fits else _even_and_odd
    packed = kernel(nibbles, scale, low, bias, group_size)  # its product takes x[T, padded_K]
    if padded_K == K:
        return packed
    packed_bytes = packed.packed_bytes
    if missing_bytes and not packed_bytes:  # the kernel reads the padded copy, so the layer's codes can go
        packed_bytes = _num_bytes(nibbles, scale, low)

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return packed.product(F.pad(x, (0, padded_K - K)))

    return Packed(product, packed_bytes)


def _even_and_odd(nibbles: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """`pack_int4` computed by PyTorch's plain products, with weights that are made from the codes in pieces.

    The even columns of x are multiplied by the lower halves of the bytes, and the odd columns by the upper
    halves. So the codes need not be brought into another order.
    """
    N, half_K = nibbles.shape
    pieces = _pieces(N, 2 * half_K)

    def weights(codes: Tensor, piece: slice) -> Tensor:
        """codes[n, K / 2], the even or the odd columns of the rows `piece` -> weights[n, K / 2]."""
        groups = codes.view(len(codes), -1, group_size // 2).to(bias.dtype)  # [n, groups, group_size / 2]
        return groups.mul_(scale[piece, :, None]).add_(low[piece, :, None]).view(len(codes), half_K)

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        even, odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()  # [T, K / 2] each
        sums: list[Tensor] = []  # [T, n] for each piece
        for piece in pieces:
            even_sums = even @ weights(nibbles[piece] & 15, piece).T
            sums.append(torch.addmm(even_sums, odd, weights(nibbles[piece] >> 4, piece).T))
        return _join(sums).add_(bias)

    return Packed(product)


def _aten_by_groups(nibbles: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """`pack_int4` computed by PyTorch's kernel over four-bit codes. For this kernel
    weight = (code - 8) · scale + zero, so zero = low + 8 · scale.
    """
    codes = unpack_nibbles(nibbles, 2 * nibbles.shape[1]).int()
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale, low = scale.T.to(bias.dtype), low.T.to(bias.dtype)
    scale_and_zero = torch.stack([scale, low + 8 * scale], 2).contiguous()  # [groups, N, 2]

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scale_and_zero).add_(bias)

    return Packed(product, _num_bytes(weight, scale_and_zero))


def _join(columns: list[Tensor]) -> Tensor:
    """Columns [T, n] -> [T, N], side by side. A single tensor is returned as it is: `cat` would copy it."""
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]


def _largest(x: Tensor) -> Tensor:
    """x[T, K] -> the largest magnitude of each row, [T, 1] in fp32, and at least MIN_LARGEST."""
    return x.abs().amax(1, keepdim=True).float().clamp_(min=MIN_LARGEST)


def _num_bytes(*tensors: Tensor) -> int:
    """The bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _pieces(N: int, K: int) -> list[slice]:
    """Slices of the rows of codes[N, K], with at most PIECE weights each, but at least a row."""
    rows = max(1, PIECE // K)
    return [slice(start, start + rows) for start in range(0, N, rows)]
