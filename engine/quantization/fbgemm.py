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

Product = Callable[[Tensor, Tensor | float], Tensor]  # x[T, K], largest: of all or [T, 1] -> [T, N] in fp32
FEW = 64  # rows of a decode step, whose place is kept from one product to the next


def is_here() -> bool:
    """Whether PyTorch was built with FBGEMM, and it is chosen."""
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
    _swallow_deprecation_warnings()
    product = _prepacked(torch.full((1, 64), 127, dtype=torch.int8), most=127)
    return 127 if abs(float(product(torch.ones(1, 64), 1.0)) - 64 * 127) < 1 else 63


def int8_product(codes: Tensor, most: int) -> Product:
    """codes[N, K] in int8 -> their product."""
    _swallow_deprecation_warnings()
    lean = hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    return _lean(codes, most) if lean else _prepacked(codes, most)


@cache
def _swallow_deprecation_warnings() -> None:
    """The functions that `_lean` calls are in torch 2.11 to 2.13 and announced to go (`_prepacked` is the way
    that stays, and makes a quantized tensor, of which torch says the same). Torch warns at the first call of
    each, and never again. So all are called here first, and no filter is left behind in our user's process.
    """
    code = torch.zeros(1, 1, dtype=torch.int8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(fbgemm_.*|.*quantized tensor.*) deprecated")
        _prepacked(code, most=127)
        if hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
            _lean(code, most=127)(torch.ones(1, 1), 1.0)


def _lean(codes: Tensor, most: int) -> Product:
    """This call chooses the codes' range itself, from the smallest number of all rows to the largest. So
    that no row's codes depend on another's, two more columns hold the ends of the range that we want,
    with weights of 0.
    """
    wide = F.pad(codes, (0, 2))
    packed, offsets = torch.fbgemm_pack_quantized_matrix(wide), wide.sum(1, dtype=torch.int32)
    shape = torch.zeros(1, 1, dtype=torch.int8).expand_as(wide)  # of the weights it is only asked for that
    no_bias, rows_for = torch.zeros(len(codes)), _rows_of_width(codes.shape[1], most)

    def product(x: Tensor, largest: Tensor | float) -> Tensor:
        rows, inner = rows_for(len(x))
        torch.div(x, largest, out=inner)
        return torch.fbgemm_linear_int8_weight_fp32_activation(rows, shape, packed, offsets, 1.0, 0, no_bias)

    return product


class _Scratch(threading.local):
    """Rows of each thread's own, so that none writes where another reads."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [FEW, K + 2]
        self.views: dict[int, tuple[Tensor, Tensor]] = {}  # T -> its first T rows, with and without the ends


@cache
def _rows_of_width(K: int, most: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """T -> rows[T, K + 2] with the ends of the range in the last two columns, and a view of the others."""
    zero, scratch = most + 1, _Scratch()

    def new_rows(T: int) -> Tensor:
        rows = torch.empty(T, K + 2, dtype=torch.float32)
        rows[:, K:] = torch.tensor([-zero / most, (255 - zero) / most])
        return rows

    def rows_for(T: int) -> tuple[Tensor, Tensor]:
        if T > FEW:
            rows = new_rows(T)
            return rows, rows[:, :K]
        if T not in scratch.views:
            with torch.inference_mode(False):  # or nothing could be written there outside of that mode
                scratch.rows = new_rows(FEW) if scratch.rows is None else scratch.rows
                scratch.views[T] = scratch.rows[:T], scratch.rows[:T, :K]
        return scratch.views[T]

    return rows_for


def _prepacked(codes: Tensor, most: int) -> Product:
    """Zero points of weights must be whole numbers: given floats, FBGEMM returns garbage without an error."""
    N = len(codes)
    weight = torch._make_per_channel_quantized_tensor(
        codes, torch.ones(N, dtype=torch.double), torch.zeros(N, dtype=torch.int64), 0
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda x, largest: multiply(x / largest, 1 / most, most + 1, packed)
