"""The reference products of a quantized linear layer, which every faster kernel must match. Part 17.

Promises y = x·Wᵀ + b, where W is the weights that the codes stand for. W itself is never made: weights that
share a scale are summed as codes, and the sum is multiplied by the scale. x may have any dtype. Sums are in
fp32, since a sum of x · code may be too large for fp16 although the result is not. The functions run on any
device; only `linear_of_codes`, whose sums are whole numbers, needs a CPU. This module does not know layers.
"""

import torch
from torch import Tensor

from engine.quantization.codes import unpack_nibbles


def linear_by_rows(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x[T, K], codes[N, K] in int8, scale[N], bias[N] -> [T, N] in the dtype of x.

    Σ x_k · (code_k · scale) = (Σ x_k · code_k) · scale.
    """
    sums = x.float() @ codes.float().T  # [T, N]
    return (sums * scale + bias).to(x.dtype)


def linear_by_groups(
    x: Tensor, nibbles: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int
) -> Tensor:
    """x[T, K], nibbles[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> [T, N].

    Within a group: Σ x_k · (low + code_k · scale) = (Σ x_k) · low + (Σ x_k · code_k) · scale. The last group
    may be shorter. Sums are in fp32. The result has the dtype of x.
    """
    K = x.shape[1]
    total = bias.float().expand(len(x), -1)  # [T, N]
    codes = unpack_nibbles(nibbles, K).float()
    for group, start in enumerate(range(0, K, group_size)):
        part = x[:, start : start + group_size].float()  # [T, group_size]; the last one may be shorter
        sums = part @ codes[:, start : start + group_size].T  # [T, N]
        total = total + sums * scale[:, group] + part.sum(1, keepdim=True) * low[:, group]
    return total.to(x.dtype)


def quantize_activations(x: Tensor, max_level: int) -> tuple[Tensor, Tensor]:
    """x[T, K] -> codes[T, K] in int8, from -max_level to max_level (at most 127), and scale[T].

    Each row has its own scale, so a request's numbers do not depend on the other rows of the step.
    """
    largest = x.abs().amax(1)  # [T]
    scale = torch.where(largest > 0, largest / max_level, 1.0)
    return (x / scale[:, None]).round().to(torch.int8), scale


def linear_of_codes(x_codes: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x_codes[T, K] and codes[N, K] in int8, x_scale[T], scale[N], bias[N] -> [T, N].

    The sum of products of codes is exact, since codes are whole numbers. The sum is then multiplied by the
    row's scale and the column's scale.
    """
    sums = x_codes.int() @ codes.int().T  # [T, N]
    return sums * x_scale[:, None] * scale + bias
