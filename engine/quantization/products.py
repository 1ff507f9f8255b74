"""Linear layers over codes, written plainly: what every faster kernel must equal. Part 17.

Promises y = x·Wᵀ + b for the W that the codes stand for, without making W: a scale that many weights share
comes out of their sum. Any device, any dtype of x, which is the result's; sums are in fp32, since a sum of
x · code may be larger than fp16 can hold where the result is not. Does not know layers.
"""

import torch
from torch import Tensor

from engine.quantization.codes import unpack_nibbles


def linear_by_rows(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x[T, K], codes[N, K] in int8, scale[N], bias[N] -> [T, N].

    Σ x_k · (code_k · scale) = (Σ x_k · code_k) · scale.
    """
    return (x.float() @ codes.float().T * scale + bias).to(x.dtype)


def linear_by_groups(
    x: Tensor, packed: Tensor, scale: Tensor, low: Tensor, bias: Tensor, group_size: int
) -> Tensor:
    """x[T, K], packed[N, ceil(K / 2)], scale and low[N, groups], bias[N] -> [T, N].

    Within a group: Σ x_k · (low + code_k · scale) = (Σ x_k) · low + (Σ x_k · code_k) · scale. The last group
    may be shorter. Sums are in fp32, the result has the dtype of x.
    """
    K = x.shape[1]
    total = bias.float().expand(len(x), -1)  # [T, N]
    codes = unpack_nibbles(packed, K).float()
    for group, start in enumerate(range(0, K, group_size)):
        part = x[:, start : start + group_size].float()  # [T, group_size]; the last one may be shorter
        sums = part @ codes[:, start : start + group_size].T  # [T, N]
        total = total + sums * scale[:, group] + part.sum(1, keepdim=True) * low[:, group]
    return total.to(x.dtype)


def quantize_activations(x: Tensor, max_level: int) -> tuple[Tensor, Tensor]:
    """x[T, K] -> codes[T, K] from -max_level to max_level, scale[T]: each row by itself, so that a
    request's numbers do not depend on the other rows of the step.
    """
    largest = x.abs().amax(1)  # [T]
    scale = torch.where(largest > 0, largest / max_level, 1.0)
    return (x / scale[:, None]).round().to(torch.int8), scale


def linear_of_codes(x_codes: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x_codes[T, K] and codes[N, K] in int8, x_scale[T], scale[N], bias[N] -> [T, N].

    Both sides are whole numbers: the sum of their products is exact, and has two scales.
    """
    sums = x_codes.int() @ codes.int().T  # [T, N]
    return sums * x_scale[:, None] * scale + bias
