"""FBGEMM's product of int8 by int8 on x86, with a range of activation codes that we choose. Part 17.

Promises Σ round(x / largest · max_level) · code / max_level for x from -largest to largest, exact up to the
rounding of fp32. A row's result does not depend on other rows. FBGEMM's codes of activations go from 0 to
255, and the code max_level + 1 stands for 0.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# x[T, K], largest magnitude (one number, or [T, 1] with one for each row) -> [T, N] in fp32
ScaledProduct = Callable[[Tensor, Tensor | float], Tensor]
SCRATCH_ROWS = 64  # a step of up to 64 rows (a decode step) reuses the same memory for its rows


def is_available() -> bool:
    """Whether PyTorch was built with FBGEMM and uses it."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@cache
def max_activation_level() -> int:
    """`max_level`, the largest level of an activation: 127, or 63 if sums of two products overflow. Without
    FBGEMM, 127.

    A processor with the VNNI instructions adds products in 32 bits. Another x86 processor adds products in
    pairs in 16 bits, and cuts each sum off at 32,767 without an error. Two products of the code 255 and the
    weight 127 make 64,770, which is cut off. With codes up to 127 the sum is at most 32,258. This function
    computes a product of the largest numbers and checks whether the result is right.
    """
    if not is_available():
        return 127
    _swallow_deprecation_warnings()
    product = _stable_api_product(torch.full((1, 64), 127, dtype=torch.int8), max_level=127)
    error = float(product(torch.ones(1, 64), 1.0)) - 64 * 127
    return 127 if abs(error) < 1 else 63


def scaled_product(codes: Tensor, max_level: int) -> ScaledProduct:
    """codes[N, K] in int8 -> the product with these codes, as the module's docstring defines the product."""
    _swallow_deprecation_warnings()
    if hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
        return _low_overhead_product(codes, max_level)
    return _stable_api_product(codes, max_level)


@cache
def _swallow_deprecation_warnings() -> None:
    """Call each deprecated function of torch once, with its warning ignored.

    torch warns at the first call of a function only. So later calls do not warn, and no warning filter stays
    behind in the user's process. torch 2.11 to 2.13 have the functions of `_low_overhead_product`, and later
    versions may not. torch will keep those of `_stable_api_product`.
    """
    code = torch.zeros(1, 1, dtype=torch.int8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(fbgemm_.*|.*quantized tensor.*) deprecated")
        _stable_api_product(code, max_level=127)
        if hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
            _low_overhead_product(code, max_level=127)(torch.ones(1, 1), 1.0)


def _low_overhead_product(codes: Tensor, max_level: int) -> ScaledProduct:
    """The product by the call with the lowest cost, which future versions of torch will not have.

    FBGEMM takes the smallest and the largest number of all rows of x as the range of the codes. A row's codes
    would then depend on the other rows. So x gets two more columns, which hold the ends of the range that we
    want. The weights of these columns are 0.
    """
    wide = F.pad(codes, (0, 2))  # [N, K + 2]
    packed = torch.fbgemm_pack_quantized_matrix(wide)
    offsets = wide.sum(1, dtype=torch.int32)  # [N]
    shape = torch.zeros(1, 1, dtype=torch.int8).expand_as(wide)  # the call reads only its shape
    no_bias = torch.zeros(len(codes))
    padded_rows = _padded_rows(codes.shape[1], max_level)

    def product(x: Tensor, largest: Tensor | float) -> Tensor:
        rows, x_columns = padded_rows.get(len(x))
        torch.div(x, largest, out=x_columns)
        return torch.fbgemm_linear_int8_weight_fp32_activation(rows, shape, packed, offsets, 1.0, 0, no_bias)

    return product


class _PaddedRows(threading.local):
    """Rows of x[T, K] with two more columns, which hold the ends of the range.

    Up to SCRATCH_ROWS rows lie in memory that every call reuses. Each thread has memory of its own, so no
    thread writes where another thread reads.
    """

    def __init__(self, K: int, max_level: int) -> None:
        self.K = K
        zero_point = max_level + 1  # the code of 0; codes 0 and 255 stand for the ends of the range
        self.range_ends = torch.tensor([-zero_point / max_level, (255 - zero_point) / max_level])
        self.scratch: Tensor | None = None  # [SCRATCH_ROWS, K + 2]
        self.views: dict[int, tuple[Tensor, Tensor]] = {}  # by T: the results of `get`

    def get(self, T: int) -> tuple[Tensor, Tensor]:
        """-> rows[T, K + 2], and the view [T, K] of their first columns, which the caller fills."""
        if T > SCRATCH_ROWS:
            rows = self._new(T)
            return rows, rows[:, : self.K]
        if T not in self.views:
            # A tensor that is made in inference mode cannot be written to outside inference mode.
            with torch.inference_mode(False):
                if self.scratch is None:
                    self.scratch = self._new(SCRATCH_ROWS)
                self.views[T] = self.scratch[:T], self.scratch[:T, : self.K]
        return self.views[T]

    def _new(self, T: int) -> Tensor:
        """rows[T, K + 2], in which the two last columns are filled."""
        rows = torch.empty(T, self.K + 2, dtype=torch.float32)
        rows[:, self.K :] = self.range_ends
        return rows


@cache
def _padded_rows(K: int, max_level: int) -> _PaddedRows:
    """The rows that all products of this width share."""
    return _PaddedRows(K, max_level)


def _stable_api_product(codes: Tensor, max_level: int) -> ScaledProduct:
    """The product by the calls that torch will keep. The zero points of weights must be of an integer dtype:
    with floats FBGEMM returns wrong numbers without an error.
    """
    N = len(codes)
    weight = torch._make_per_channel_quantized_tensor(
        codes, torch.ones(N, dtype=torch.double), torch.zeros(N, dtype=torch.int64), 0
    )
    packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    scale, zero_point = 1 / max_level, max_level + 1  # of the codes of x / largest

    def product(x: Tensor, largest: Tensor | float) -> Tensor:
        return multiply(x / largest, scale, zero_point, packed)

    return product
