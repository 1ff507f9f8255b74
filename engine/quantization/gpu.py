"""Products over codes on a GPU. Part 17.

Promises the products of products.py up to rounding. Up to MAX_CODE_ROWS rows of x (a decode step) are
multiplied by codes (engine/kernels/quantized_matmul.py). More rows (a prompt) are multiplied by weights,
which each call makes from the codes: with many rows the time goes into arithmetic, and not into reading the
weights. All products read the layer's own codes. Needs the package triton.
"""

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized_matmul import int4_linear, int8_linear
from engine.quantization.codes import dequantize_groups, unpack_nibbles
from engine.quantization.packed import Packed

MAX_CODE_ROWS = 64  # the most rows of x that are multiplied by codes


def pack_int8(codes: Tensor, scale: Tensor, bias: Tensor) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product of method "int8" with x[T, K]."""

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        if len(x) <= MAX_CODE_ROWS:
            return int8_linear(x, codes, scale, bias)
        return F.linear(x, (codes * scale[:, None]).to(x.dtype), bias.to(x.dtype))

    return Packed(product)


def pack_int4(nibbles: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int) -> Packed:
    """nibbles[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> the product of "int4" with x[T, K]."""

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        if len(x) <= MAX_CODE_ROWS:
            return int4_linear(x, nibbles, scale, low, bias, group_size)
        weight = dequantize_groups(unpack_nibbles(nibbles, x.shape[1]), scale, low, group_size)  # [N, K]
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    return Packed(product)
