"""Linear layers whose weights are laid out once, at load, for the processor that will read them. Part 3.

With a cache, a step computes little and reads every weight once. Promises the same result as nn.Linear up to
fp32 rounding. Which layout is fastest depends on the processor, on a layer's shape and on how many rows
(tokens) share one reading of the weights, so `pack_linears` measures on the model at hand and keeps the
winner for each shape: one for a single row, and another for many where that pays.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel, linear_names, replace_linears
from engine.models.weights import Module

IN_USE = 1.15  # fp32 weights take so many times as long in use, where keys and values want the same caches
BYTES_BETWEEN = 2**24  # other memory that is touched between two passes over the weights
SECOND_FORM = 0.9  # a second form takes memory: it must need less than this share of the first one's time
Shape = tuple[int, int]  # of a linear layer: in, out


class Half(Module):
    """Weights kept in fp16 and widened to fp32 as they are read (FBGEMM, on x86): half the bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        _swallow_deprecation_warnings()
        self.packed, self.bias = torch.fbgemm_pack_gemm_matrix_fp16(linear.weight), _bias(linear)

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        """Only where it loses nothing: the weights came from fp16. (The bias stays fp32.)"""
        weight = linear.weight
        return (
            torch.backends.quantized.engine in ("x86", "fbgemm")
            and hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
            and _is_fp32_on_cpu(linear)
            and torch.equal(weight.half().float(), weight)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


class SharedHalf(Module):
    """The same split over all threads: dearer per call, so it pays for many rows or large layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)

    can_pack = staticmethod(Half.can_pack)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class Transposed(Module):
    """Weights in fp32, one row per input: a token's output is then a sum of rows, read from first to last."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.detach().t().contiguous(), _bias(linear)  # [in, out], [out]

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        return _is_fp32_on_cpu(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.addmm(self.bias, x, self.weight)


class Blocked(Module):
    """Weights in fp32, reordered into the blocks oneDNN's matrix product reads: pays from several rows on."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(linear.weight), _bias(linear)

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        return torch.backends.mkldnn.is_available() and _is_fp32_on_cpu(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class ByRows(Module):
    """One layer in two forms, each for the numbers of rows at which it is the faster."""

    def __init__(self, by_size: Sequence[nn.Module]) -> None:
        """by_size[i] serves 2**i rows and more, the last one all there are beyond."""
        super().__init__()
        self.by_size = tuple(by_size)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return self.by_size[min(x.size(0).bit_length(), len(self.by_size)) - 1](x)


FORMS = (Half, SharedHalf, Transposed, Blocked)
SIZES = [2**i for i in range(8)]  # rows, 1 to 128, at which two forms are compared


def pack_linears(model: AnyModel, rows: int = 1) -> AnyModel:
    """Replace the model's linear layers by their fastest lossless form, in place, shape by shape: that for
    `rows` rows, and beside it that for a single row, if it is another and much faster there. Which of two
    serves a number of rows is measured at powers of two; where they are equal, the one for `rows` does.

    For `load_model(..., transform=pack_linears)`. Leaves a model alone that is not in fp32 on a CPU, or for
    which nothing beats nn.Linear; and layers that are no nn.Linear. Takes up to two seconds per ten million
    weights.
    """
    layers = [model.get_submodule(name) for name in linear_names(model)]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    shapes = [_shape(linear) for linear in linears]
    # 1. Which form wins at one row, which at many? Each is dropped again: all at once might not fit into
    # memory.
    at_one, at_many = {}, {}
    for form in (_unchanged, *(form for form in FORMS if all(map(form.can_pack, linears)))):
        packed = [form(linear) for linear in linears]
        at_one[form], at_many[form] = (_seconds_by_shape(linears, packed, n) for n in (1, rows))
    for_one, for_many = {}, {}
    for shape in shapes:
        for_one[shape], for_many[shape] = (
            min(seconds, key=lambda form: seconds[form][shape]) for seconds in (at_one, at_many)
        )
        if rows == 1 or at_one[for_one[shape]][shape] >= SECOND_FORM * at_one[for_many[shape]][shape]:
            for_one[shape] = for_many[shape]
    # 2. One form for the layers of a shape; or two, each for the numbers of rows at which it is the faster.
    chosen = [for_many[shape](linear) for shape, linear in zip(shapes, linears, strict=True)]
    if for_one != for_many:
        second = [
            for_one[shape](linear) if for_one[shape] is not for_many[shape] else first
            for shape, linear, first in zip(shapes, linears, chosen, strict=True)
        ]
        seconds_at = [[_seconds_by_shape(linears, packed, n) for packed in (second, chosen)] for n in SIZES]
        for i, (shape, few, many) in enumerate(zip(shapes, second, chosen, strict=True)):
            if few is not many:
                chosen[i] = ByRows([few if a[shape] < b[shape] else many for a, b in seconds_at])
    replacement: dict[nn.Module, nn.Module] = dict(zip(linears, chosen, strict=True))
    return replace_linears(model, lambda name, layer: replacement.get(layer, layer))


@cache
def _swallow_deprecation_warnings() -> None:
    """FBGEMM's two functions for fp16 are in torch 2.11 to 2.13 and announced to go (SharedHalf is the way
    that stays). Torch says so at the first call of each, and never again. So both are called here first,
    with the warning ignored, and no filter is left behind in our user's process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fbgemm_.*fp16.* is deprecated")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
        torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), packed, torch.zeros(1))


def _unchanged(linear: nn.Linear) -> nn.Module:
    return linear


def _shape(linear: nn.Linear) -> Shape:
    return linear.in_features, linear.out_features


def _seconds_by_shape(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> dict[Shape, float]:
    """What the layers of each shape take of a step in this form, and what fp32 loses in use."""
    total: defaultdict[Shape, float] = defaultdict(float)
    times = _seconds_per_layer(linears, packed, rows)
    for linear, layer, seconds in zip(linears, packed, times, strict=True):
        total[_shape(linear)] += seconds if isinstance(layer, (Half, SharedHalf)) else seconds * IN_USE
    return total


@torch.inference_mode()
def _seconds_per_layer(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> list[float]:
    """Median of several passes over all layers in order, with other memory touched in between, so that the
    caches hold what they would in use. (In the best pass they hold more, and another form wins.)
    """
    other_memory = torch.zeros(BYTES_BETWEEN, dtype=torch.uint8)
    inputs = [torch.ones(rows, linear.in_features).to(linear.weight) for linear in linears]
    passes: list[list[float]] = []
    while len(passes) < 3 or (len(passes) < 10 and sum(map(sum, passes)) < 0.03):
        other_memory.add_(1)
        times = [time.perf_counter()]
        for layer, x in zip(packed, inputs, strict=True):
            layer(x)
            times.append(time.perf_counter())
        passes.append([end - start for start, end in pairwise(times)])
    return list(map(median, zip(*passes, strict=True)))


def _bias(linear: nn.Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _is_fp32_on_cpu(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
