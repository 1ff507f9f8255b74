"""Weights as small whole numbers: a code for each, and a scale for many. Part 17.

Two ways. By rows: weight ≈ code · scale, codes from -127 to 127, a scale for each output channel. By groups:
weight ≈ low + code · scale, codes from 0 to 15, a scale and a low for each `group_size` neighbours of a row.

Promises that a code is the nearest there is to its weight. So by rows a weight is wrong by half its scale at
most. By groups low and scale are stored in fp16, and codes are chosen for the stored numbers: a weight
between low and low + 15 · scale is wrong by half a scale at most. Does not know layers.
"""

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # weights; what PyTorch's kernel and ours take
RANGE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range: each is tried
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

    The last group of a row may be shorter. A group's range goes from its smallest weight to its largest;
    a few narrower ranges around the same middle are tried, too, and the one whose squared error is the
    smallest is taken: where one weight is far out, clipping it serves the others.

    Raises ValueError: a weight that fp16 cannot hold.
    """
    K = weight.shape[1]
    parts = _in_groups(weight.float(), group_size)  # [N, groups, group_size]
    least, most = parts.amin(2), parts.amax(2)
    if max(-least.min(), most.max()) > LARGEST_FP16:
        raise ValueError(f"a weight of {float(parts.abs().max()):g}: up to {LARGEST_FP16:,} are accepted")
    error, codes, scale, low = _quantized(parts, least, most, RANGE_SHARES[0])
    for share in RANGE_SHARES[1:]:
        new_error, new_codes, new_scale, new_low = _quantized(parts, least, most, share)
        is_better = new_error < error  # [N, groups]: of each group, what has the smaller error stays
        error = torch.where(is_better, new_error, error)
        codes = torch.where(is_better[..., None], new_codes, codes)
        scale = torch.where(is_better, new_scale, scale)
        low = torch.where(is_better, new_low, low)
    return codes.flatten(1)[:, :K].to(torch.uint8), scale, low


def _quantized(
    parts: Tensor, least: Tensor, most: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """parts[N, groups, group_size], whose smallest and largest are least and most[N, groups] -> squared
    error[N, groups], codes as `parts`, scale and low[N, groups] in fp16, with this share of each range.
    """
    # 1. Scale and low, as they are stored: in fp16.
    half_range = (most - least) / 2 * share  # [N, groups]
    low, scale = ((least + most) / 2 - half_range).half(), (2 * half_range / 15).half()
    # 2. The nearest codes for these. A group without a range has the scale 0, and any code will do.
    step = torch.where(scale > 0, scale, 1).float()[..., None]
    codes = ((parts - low.float()[..., None]) / step).round().clamp(0, 15)
    error = (low.float()[..., None] + codes * scale.float()[..., None] - parts).square().sum(2)
    return error, codes, scale, low


def dequantize_groups(codes: Tensor, scale: Tensor, low: Tensor, group_size: int) -> Tensor:
    """What `quantize_groups` gave -> [N, K] in fp32."""
    K = codes.shape[1]
    scale, low = (x.float().repeat_interleave(group_size, 1)[:, :K] for x in (scale, low))
    return low + codes * scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes[N, K], 0 to 15 -> [N, ceil(K / 2)] in uint8: the even ones in a byte's lower four bits."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: Tensor, K: int) -> Tensor:
    """What `pack_nibbles` gave -> codes[N, K] in uint8. Where K is odd, the last byte's upper half is no
    code.
    """
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, :K]


def _in_groups(weight: Tensor, group_size: int) -> Tensor:
    """[N, groups, group_size]; a short last group is filled up with its last weight, which changes neither
    its smallest nor its largest.
    """
    N, K = weight.shape
    missing = -K % group_size
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(N, missing)], 1)
    return weight.view(N, -1, group_size)
