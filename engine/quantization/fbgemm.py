"""FBGEMM's product of int8 by int8, on x86, with the range of the activations' codes in our hands. Part 17.

Promises Σ round(x / largest · most) · code, by most, for x from -largest to largest, exact but for what
fp32 holds, and each row for itself. FBGEMM codes activations from 0 to 255, with the zero in the middle.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# The leanest way in is in torch 2.11 to 2.13 and announced to go; `_prepacked` is the way that stays.
warnings.filterwarnings("ignore", message="fbgemm_.* is deprecated")
warnings.filterwarnings("ignore", message=".*quantized tensor.*deprecated")

Product = Callable[[Tensor, Tensor | float], Tensor]  # x[T, K], largest: of all or [T, 1] -> [T, N] in fp32
FEW = 64  # rows of a decode step, whose place is kept from one product to the next


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
    return 127 if abs(float(product(torch.ones(1, 64), 1.0)) - 64 * 127) < 1 else 63


def int8_product(codes: Tensor, most: int) -> Product:
    """codes[N, K] in int8 -> their product."""
    lean = hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    return _lean(codes, most) if lean else _prepacked(codes, most)


def _lean(codes: Tensor, most: int) -> Product:
    """This call chooses the codes' range itself, from the smallest number of all rows to the largest. So
    that no row's codes depend on another's, two more columns hold the ends of the range that we want,
    with weights of 0.
    """
    wide = F.pad(codes, (0, 2))
    packed, offsets = torch.fbgemm_pack_quantized_matrix(wide), wide.sum(1, dtype=torch.int32)
    shape = torch.zeros(1, 1, dtype=torch.int8).expand_as(wide)  # of the weights it is only asked for that
    none, room = torch.zeros(len(codes)), _room(codes.shape[1], most)

    def product(x: Tensor, largest: Tensor | float) -> Tensor:
        rows, inner = room(len(x))
        torch.div(x, largest, out=inner)
        return torch.fbgemm_linear_int8_weight_fp32_activation(rows, shape, packed, offsets, 1.0, 0, none)

    return product


class _Rows(threading.local):
    """Each thread's own, so that none writes where another reads."""

    def __init__(self) -> None:
        self.all: Tensor | None = None  # [FEW, K + 2]
        self.of: dict[int, tuple[Tensor, Tensor]] = {}  # views of it


@cache
def _room(K: int, most: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """T -> rows[T, K + 2] with the ends of the range in the last two columns, and a view of the others."""
    zero, kept = most + 1, _Rows()

    def made(T: int) -> Tensor:
        rows = torch.empty(T, K + 2, dtype=torch.float32)
        rows[:, K:] = torch.tensor([-zero / most, (255 - zero) / most])
        return rows

    def room(T: int) -> tuple[Tensor, Tensor]:
        if T > FEW:
            rows = made(T)
            return rows, rows[:, :K]
        if T not in kept.of:
            with torch.inference_mode(False):  # or nothing could be written there outside of that mode
                kept.all = made(FEW) if kept.all is None else kept.all
                kept.of[T] = kept.all[:T], kept.all[:T, :K]
        return kept.of[T]

    return room


def _prepacked(codes: Tensor, most: int) -> Product:
    """Zero points of weights must be whole numbers: given floats, FBGEMM returns garbage without an error."""
    N = len(codes)
    weight = torch._make_per_channel_quantized_tensor(
        codes, torch.ones(N, dtype=torch.double), torch.zeros(N, dtype=torch.int64), 0
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda x, largest: multiply(x / largest, 1 / most, most + 1, packed)
