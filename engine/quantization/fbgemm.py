"""FBGEMM's product of int8 by int8, on x86, with the range of the activations' codes in our hands. Part 17.

Promises Σ round(x · most) · code, by most, for x from -1 to 1, exact but for what fp32 holds, and each
row for itself. FBGEMM codes activations from 0 to 255, with the zero in the middle.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# The leanest way in is in torch 2.11 to 2.13 and announced to go; `_prepacked` is the way that stays.
warnings.filterwarnings("ignore", message="fbgemm_.* is deprecated")
warnings.filterwarnings("ignore", message=".*quantized tensor.*deprecated")


def is_here() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@cache
def activation_steps() -> int:
    """`most`, the largest code of an activation: 127, or 63 where sums of two products overflow.

    Without instructions made for it (VNNI), an x86 processor adds products in pairs in 16 bits, silently
    cut off at 32,767. Activations of 255 and weights of 127 make 64,770; activations up to 127 make
    32,258. So the processor is asked what it makes of the largest.
    """
    if not is_here():
        return 127
    product = _prepacked(torch.full((1, 64), 127, dtype=torch.int8), most=127)
    return 127 if abs(float(product(torch.ones(1, 64))) - 64 * 127) < 1 else 63


def int8_product(codes: Tensor, most: int) -> Callable[[Tensor], Tensor]:
    """codes[N, K] in int8 -> a function of x[T, K], from -1 to 1, that gives [T, N] in fp32."""
    lean = hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    return _lean(codes, most) if lean else _prepacked(codes, most)


def _lean(codes: Tensor, most: int) -> Callable[[Tensor], Tensor]:
    """This call chooses the codes' range itself, from the smallest number of all rows to the largest. So
    that no row's codes depend on another's, two more columns hold the ends of the range that we want,
    with weights of 0.
    """
    wide = F.pad(codes, (0, 2))
    packed, offsets = torch.fbgemm_pack_quantized_matrix(wide), wide.sum(1, dtype=torch.int32)
    zero, none = most + 1, torch.zeros(len(codes))
    ends = torch.tensor([[-zero / most, (255 - zero) / most]])
    shape = torch.zeros(1, 1, dtype=torch.int8).expand_as(wide)  # of the weights it is only asked for that

    def product(x: Tensor) -> Tensor:
        x = torch.cat([x, ends.expand(len(x), 2)], 1)
        return torch.fbgemm_linear_int8_weight_fp32_activation(x, shape, packed, offsets, 1.0, 0, none)

    return product


def _prepacked(codes: Tensor, most: int) -> Callable[[Tensor], Tensor]:
    """Zero points of weights must be whole numbers: given floats, FBGEMM returns garbage without an error."""
    N = len(codes)
    weight = torch._make_per_channel_quantized_tensor(
        codes, torch.ones(N, dtype=torch.double), torch.zeros(N, dtype=torch.int64), 0
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda x: multiply(x, 1 / most, most + 1, packed)
