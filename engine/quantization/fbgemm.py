"""FBGEMM's product of int8 by int8, on x86, where we choose the range of the activations' codes. Part 17.

Promises Σ round(x / largest · max_level) · code / max_level for x from -largest to largest: exact up to the
rounding of fp32, and a row's result does not depend on other rows. FBGEMM codes activations from 0 to 255,
with the zero in the middle.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor | float], Tensor]  # x[T, K], largest: of all or [T, 1] -> [T, N] in fp32
SCRATCH_ROWS = 64  # up to so many rows (a decode step) are written into memory that is used again and again


def is_available() -> bool:
    """Whether PyTorch was built with FBGEMM and uses it."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@cache
def max_activation_level() -> int:
    """`max_level`, the largest level of an activation: 127, or 63 where sums of two products overflow.

    Without instructions made for it (VNNI), an x86 processor adds products in pairs in 16 bits, silently
    cut off at 32,767. Two products of codes of 255 by weights of 127 make 64,770; of codes up to 127 they
    make 32,258. So a product of the largest numbers is computed here, and looked at.
    """
    if not is_available():
        return 127
    _swallow_deprecation_warnings()
    product = _prepacked(torch.full((1, 64), 127, dtype=torch.int8), max_level=127)
    return 127 if abs(float(product(torch.ones(1, 64), 1.0)) - 64 * 127) < 1 else 63


def int8_product(codes: Tensor, max_level: int) -> Product:
    """codes[N, K] in int8 -> the product with them, as the head of this file says."""
    _swallow_deprecation_warnings()
    lean = hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    return _lean(codes, max_level) if lean else _prepacked(codes, max_level)


@cache
def _swallow_deprecation_warnings() -> None:
    """Call everything that torch announces to go, once, with its warning ignored: torch warns at the first
    call of each, and then no more. So no filter is left behind in our user's process. `_lean` has the lowest
    cost per call; its functions are in torch 2.11 to 2.13. Those of `_prepacked` stay.
    """
    code = torch.zeros(1, 1, dtype=torch.int8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(fbgemm_.*|.*quantized tensor.*) deprecated")
        _prepacked(code, max_level=127)
        if hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
            _lean(code, max_level=127)(torch.ones(1, 1), 1.0)


def _lean(codes: Tensor, max_level: int) -> Product:
    """This call chooses the range of x's codes itself, from the smallest number of all rows to the largest.
    So that no row's codes depend on another row, two more columns of x hold the ends of the range that we
    want; their weights are 0.
    """
    wide = F.pad(codes, (0, 2))  # [N, K + 2]
    packed, offsets = torch.fbgemm_pack_quantized_matrix(wide), wide.sum(1, dtype=torch.int32)
    shape = torch.zeros(1, 1, dtype=torch.int8).expand_as(wide)  # the call reads no more of it than its shape
    no_bias = torch.zeros(len(codes))
    rows_for = _rows_of_width(codes.shape[1], max_level)

    def product(x: Tensor, largest: Tensor | float) -> Tensor:
        rows, first_K = rows_for(len(x))
        torch.div(x, largest, out=first_K)
        return torch.fbgemm_linear_int8_weight_fp32_activation(rows, shape, packed, offsets, 1.0, 0, no_bias)

    return product


class _Scratch(threading.local):
    """Memory for rows, one for each thread, so that no thread writes where another reads."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [SCRATCH_ROWS, K + 2]
        self.views: dict[int, tuple[Tensor, Tensor]] = {}  # T -> its first T rows, with and without the ends


@cache
def _rows_of_width(K: int, max_level: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """T -> rows[T, K + 2] with the ends of the range in the last two columns, and a view of the first K."""
    scratch = _Scratch()
    zero_point = max_level + 1  # the code of 0; codes 0 and 255 stand for the ends of the range

    def new_rows(T: int) -> Tensor:
        rows = torch.empty(T, K + 2, dtype=torch.float32)
        rows[:, K:] = torch.tensor([-zero_point / max_level, (255 - zero_point) / max_level])
        return rows

    def rows_for(T: int) -> tuple[Tensor, Tensor]:
        if T > SCRATCH_ROWS:
            rows = new_rows(T)
            return rows, rows[:, :K]
        if T not in scratch.views:
            # What is made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                if scratch.rows is None:
                    scratch.rows = new_rows(SCRATCH_ROWS)
                scratch.views[T] = scratch.rows[:T], scratch.rows[:T, :K]
        return scratch.views[T]

    return rows_for


def _prepacked(codes: Tensor, max_level: int) -> Product:
    """By the calls that stay. Zero points of weights must be whole numbers: given floats, FBGEMM returns
    garbage without an error.
    """
    N = len(codes)
    weight = torch._make_per_channel_quantized_tensor(
        codes, torch.ones(N, dtype=torch.double), torch.zeros(N, dtype=torch.int64), 0
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda x, largest: multiply(x / largest, 1 / max_level, max_level + 1, packed)
