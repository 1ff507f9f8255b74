"""Linear layers whose weights are laid out once, at load, for the processor that will read them. Part 3.

With a cache, a step computes little and reads every weight once. Promises the same result as nn.Linear up to
fp32 rounding. Which layout is fastest depends on the processor, on a layer's shape and on how many rows
(tokens) are multiplied at a time. So `pack_linears` measures the model's layers, and takes the fastest layout
for each shape; a layer gets a second layout for a single row if it is much faster there.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel, linear_names, replace_linears
from engine.models.weights import Module

# In a running engine, where keys and values use the same caches, fp32 weights take this times as long.
FP32_SLOWDOWN = 1.15
OTHER_BYTES = 2**24  # other memory that is touched between two passes over the weights
MAX_SECOND_FORM_TIME = 0.9  # of the first form's: a second form takes memory, so it must be this much faster
Shape = tuple[int, int]  # of a linear layer: in, out
Form = Callable[[nn.Linear], nn.Module]  # makes a linear layer's weights into another layout


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
    """As `Half`, split over all threads: a call costs more, so it is faster for many rows or large layers."""

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
    """Weights in fp32, in the blocks that oneDNN's matrix product reads: faster from several rows on."""

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
        """by_size[i] computes 2**i rows and more, up to the next power of two; the last one all above."""
        super().__init__()
        self.by_size = tuple(by_size)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return self.by_size[min(x.size(0).bit_length(), len(self.by_size)) - 1](x)


FORMS = (Half, SharedHalf, Transposed, Blocked)
SIZES = [2**i for i in range(8)]  # rows, 1 to 128, at which two forms are compared


def pack_linears(model: AnyModel, rows: int = 1) -> AnyModel:
    """Replace the model's linear layers by their fastest lossless form, in place, shape by shape: the form
    for `rows` rows, and beside it the form for a single row, if it is another one and much faster there.
    Which of the two computes a number of rows is measured at powers of two; where they are equal, the one for
    `rows`.

    For `load_model(..., transform=pack_linears)`. Leaves a model alone that is not in fp32 on a CPU, or for
    which nothing beats nn.Linear; and layers that are no nn.Linear. Takes up to two seconds per ten million
    weights.
    """
    layers = [model.get_submodule(name) for name in linear_names(model)]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    shapes = [_shape(linear) for linear in linears]
    # 1. Which form is the fastest at one row, which at many? Each is deleted before the next is made: all of
    #    them might not fit into memory.
    at_one: dict[Form, dict[Shape, float]] = {}  # seconds of a step
    at_many: dict[Form, dict[Shape, float]] = {}
    for form in (_unchanged, *(form for form in FORMS if all(map(form.can_pack, linears)))):
        packed = [form(linear) for linear in linears]
        at_one[form], at_many[form] = (_seconds_by_shape(linears, packed, n) for n in (1, rows))
    for_one: dict[Shape, Form] = {}
    for_many: dict[Shape, Form] = {}
    for shape in shapes:
        for_one[shape], for_many[shape] = _fastest(at_one, shape), _fastest(at_many, shape)
        seconds, seconds_of_first = at_one[for_one[shape]][shape], at_one[for_many[shape]][shape]
        if rows == 1 or seconds >= MAX_SECOND_FORM_TIME * seconds_of_first:
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
    """The form that every layer has at first."""
    return linear


def _fastest(seconds: dict[Form, dict[Shape, float]], shape: Shape) -> Form:
    """The form in which the layers of this shape take the fewest seconds[form][shape]."""
    return min(seconds, key=lambda form: seconds[form][shape])


def _shape(linear: nn.Linear) -> Shape:
    return linear.in_features, linear.out_features


def _seconds_by_shape(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> dict[Shape, float]:
    """The seconds of a step that the layers of each shape take in this form; of fp32 weights times
    FP32_SLOWDOWN.
    """
    total: defaultdict[Shape, float] = defaultdict(float)
    times = _seconds_per_layer(linears, packed, rows)
    for linear, layer, seconds in zip(linears, packed, times, strict=True):
        total[_shape(linear)] += seconds if isinstance(layer, (Half, SharedHalf)) else seconds * FP32_SLOWDOWN
    return total


@torch.inference_mode()
def _seconds_per_layer(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> list[float]:
    """The median of several passes over all layers in order, with other memory touched in between, so that
    the processor's caches hold what they hold in a running engine. (In the fastest pass they hold more, and
    another form would win.)
    """
    other_memory = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
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
