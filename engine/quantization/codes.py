"""Weights as small whole numbers: a code for each, and a scale for many. Part 17.

Two ways. By rows: weight ≈ code · scale, with codes from -127 to 127 and a scale for each row (an output
channel). By groups: weight ≈ low + code · scale, with codes from 0 to 15, and a scale and a `low` (the weight
of code 0) for each group of `group_size` neighbours of a row.

Promises that each weight gets the nearest code. So by rows a weight is wrong by half its scale at most. By
groups, low and scale are stored in fp16, and codes are chosen for the stored numbers: a weight between low
and low + 15 · scale is wrong by half a scale at most. Does not know layers.
"""

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # weights in a group, as PyTorch's kernel and ours take them
RANGE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range: each is tried, the smallest error wins
LARGEST_FP16 = 65504


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight[N, K] -> codes[N, K] in int8, scale[N] in fp32; weight ≈ codes · scale.

    Symmetric: a row's largest magnitude gets the code 127 or -127, and 0 stays 0. A row of zeros has the
    scale 1.
    """
    weight = weight.float()
    largest = weight.abs().amax(1)  # [N]
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight[N, K] -> codes[N, K] in uint8 (0 to 15), scale and low[N, groups] in fp16.

    The last group of a row may be shorter. A group's range goes from its smallest weight to its largest. A
    few narrower ranges around the same middle are tried, too, and the one with the smallest squared error is
    taken: where one weight is far from the others, clipping it makes the others' steps smaller.

    Raises ValueError: a weight that fp16 cannot hold.
    """
    K = weight.shape[1]
    groups = _in_groups(weight.float(), group_size)  # [N, groups, group_size]
    smallest, largest = groups.amin(2), groups.amax(2)  # [N, groups] each
    if max(-smallest.min(), largest.max()) > LARGEST_FP16:
        raise ValueError(f"a weight of {float(groups.abs().max()):g}: up to {LARGEST_FP16:,} are accepted")
    error, codes, scale, low = _quantize_range(groups, smallest, largest, RANGE_SHARES[0])
    for share in RANGE_SHARES[1:]:
        new_error, new_codes, new_scale, new_low = _quantize_range(groups, smallest, largest, share)
        is_better = new_error < error  # [N, groups]: each group takes the range with the smaller error
        error = torch.where(is_better, new_error, error)
        codes = torch.where(is_better[..., None], new_codes, codes)
        scale = torch.where(is_better, new_scale, scale)
        low = torch.where(is_better, new_low, low)
    return codes.flatten(1)[:, :K].to(torch.uint8), scale, low


def _quantize_range(
    groups: Tensor, smallest: Tensor, largest: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """groups[N, groups, group_size], whose weights go from smallest to largest[N, groups] -> squared
    error[N, groups], codes[N, groups, group_size], scale and low[N, groups] in fp16, for this share of each
    group's range.
    """
    # 1. Scale and low, as they are stored: in fp16.
    half_range = (largest - smallest) / 2 * share  # [N, groups]
    low = ((smallest + largest) / 2 - half_range).half()
    scale = (2 * half_range / 15).half()
    # 2. The nearest codes for these. A group without a range has the scale 0, and any code will do.
    step = torch.where(scale > 0, scale, 1).float()[..., None]
    codes = ((groups - low.float()[..., None]) / step).round().clamp(0, 15)
    error = (low.float()[..., None] + codes * scale.float()[..., None] - groups).square().sum(2)
    return error, codes, scale, low


def dequantize_groups(codes: Tensor, scale: Tensor, low: Tensor, group_size: int) -> Tensor:
    """codes[N, K], scale and low[N, groups], as `quantize_groups` gives them -> the weights[N, K] in fp32."""
    K = codes.shape[1]
    scale, low = (x.float().repeat_interleave(group_size, 1)[:, :K] for x in (scale, low))
    return low + codes * scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes[N, K], 0 to 15 -> [N, ceil(K / 2)] in uint8: even columns in a byte's lower four bits, odd ones
    in its upper.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: Tensor, K: int) -> Tensor:
    """packed[N, ceil(K / 2)], as `pack_nibbles` gives it -> codes[N, K] in uint8. Where K is odd, the last
    byte's upper half is no code.
    """
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, :K]


def _in_groups(weight: Tensor, group_size: int) -> Tensor:
    """weight[N, K] -> [N, groups, group_size]. A short last group is filled up with copies of its last
    weight, which change neither its smallest nor its largest.
    """
    N, K = weight.shape
    missing = -K % group_size
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(N, missing)], 1)
    return weight.view(N, -1, group_size)
