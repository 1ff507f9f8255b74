"""Weights as codes: each weight becomes a small whole number, and many codes share a scale. Part 17.

There are two ways:

- By rows: weight ≈ code · scale, with codes from -127 to 127 and one scale for each row (output channel).
- By groups: weight ≈ low + code · scale, with codes from 0 to 15. A group is `group_size` neighbours in a row
  and has one scale and one `low`, which is the weight that code 0 stands for.

Promises that each weight gets the nearest code. By rows, the error of a weight is at most half its scale. By
groups, low and scale are stored in fp16, and codes are chosen for the stored numbers: the error of a weight
between low and low + 15 · scale is at most half a scale. This module does not know layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # weights in a group: the sizes that both PyTorch's kernel and our kernels accept
RANGE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of a group's range that `quantize_groups` tries
LARGEST_FP16 = 65504  # the largest number that fp16 can hold


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight[N, K] -> codes[N, K] in int8, scale[N] in fp32; weight ≈ codes · scale.

    The codes are symmetric: the largest magnitude of a row gets the code 127 or -127, and a weight of 0 gets
    the code 0. A row of zeros has the scale 1.
    """
    weight = weight.float()
    largest = weight.abs().amax(1)  # [N]
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight[N, K] -> codes[N, K] in uint8 (0 to 15), scale and low[N, groups] in fp16.

    The last group of a row may be shorter. The range of a group goes from its smallest weight to its largest
    weight. Each group also tries narrower ranges around the same middle (RANGE_SHARES), and takes the range
    with the smallest squared error. If one weight is far from the others, a narrower range clips this weight
    and gives the others a smaller scale.

    Raises ValueError if fp16 cannot hold a weight.
    """
    K = weight.shape[1]
    groups = _in_groups(weight.float(), group_size)  # [N, groups, group_size]
    smallest, largest = groups.amin(2), groups.amax(2)  # [N, groups] each
    largest_magnitude = float(torch.maximum(-smallest, largest).max())
    if largest_magnitude > LARGEST_FP16:
        raise ValueError(f"a weight of {largest_magnitude:g}: up to {LARGEST_FP16:,} are accepted")
    best = _quantize_range(groups, smallest, largest, RANGE_SHARES[0])
    for share in RANGE_SHARES[1:]:
        new = _quantize_range(groups, smallest, largest, share)
        is_better = new.error < best.error  # [N, groups]: each group keeps its best range
        best = _QuantizedGroups(
            error=torch.where(is_better, new.error, best.error),
            codes=torch.where(is_better[..., None], new.codes, best.codes),
            scale=torch.where(is_better, new.scale, best.scale),
            low=torch.where(is_better, new.low, best.low),
        )
    return best.codes.flatten(1)[:, :K].to(torch.uint8), best.scale, best.low


class _QuantizedGroups(NamedTuple):
    """The groups of a weight, quantized."""

    error: Tensor  # [N, groups]: the sum of squared errors
    codes: Tensor  # [N, groups, group_size], as floats
    scale: Tensor  # [N, groups] in fp16
    low: Tensor  # [N, groups] in fp16


def _quantize_range(groups: Tensor, smallest: Tensor, largest: Tensor, share: float) -> _QuantizedGroups:
    """Quantize groups[N, groups, group_size] with `share` (0 to 1) of each group's range. The whole range is
    smallest[N, groups] to largest[N, groups].
    """
    # 1. Scale and low in fp16, as they are stored.
    half_range = (largest - smallest) / 2 * share  # [N, groups]
    low = ((smallest + largest) / 2 - half_range).half()
    scale = (2 * half_range / 15).half()
    # 2. The nearest codes for the stored scale and low. If all weights of a group are equal, the scale is 0,
    #    and every code stands for the same weight.
    step = torch.where(scale > 0, scale, 1).float()[..., None]
    codes = ((groups - low.float()[..., None]) / step).round().clamp(0, 15)
    error = (low.float()[..., None] + codes * scale.float()[..., None] - groups).square().sum(2)
    return _QuantizedGroups(error, codes, scale, low)


def dequantize_groups(codes: Tensor, scale: Tensor, low: Tensor, group_size: int) -> Tensor:
    """codes[N, K], scale and low[N, groups] of `quantize_groups` -> weights[N, K] in fp32."""
    K = codes.shape[1]
    scale = scale.float().repeat_interleave(group_size, 1)[:, :K]  # [N, K]
    low = low.float().repeat_interleave(group_size, 1)[:, :K]  # [N, K]
    return low + codes * scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes[N, K] in uint8, from 0 to 15 -> nibbles[N, ceil(K / 2)] in uint8.

    A byte has the code of an even column in its lower four bits, and the code of the next column in its upper
    four bits. If K is odd, the upper half of the last byte is 0.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(nibbles: Tensor, K: int) -> Tensor:
    """nibbles[N, ceil(K / 2)] of `pack_nibbles` -> codes[N, K] in uint8.

    A byte's lower four bits are the code of an even column, and its upper four bits the code of the next
    column. If K is odd, the upper half of the last byte is not a code.
    """
    return torch.stack([nibbles & 15, nibbles >> 4], 2).flatten(1)[:, :K]


def _in_groups(weight: Tensor, group_size: int) -> Tensor:
    """weight[N, K] -> [N, groups, group_size]. A short last group is filled up with copies of its last
    weight, since copies change neither the smallest nor the largest weight of the group.
    """
    N, K = weight.shape
    missing = -K % group_size  # weights to the next multiple
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(N, missing)], 1)
    return weight.view(N, -1, group_size)
