"""Linear layers whose weights are laid out once, at load, for the processor that will read them. Part 3.

With a cache, a step computes little and reads every weight once. Promises the same result as nn.Linear up to
fp32 rounding. Which layout is fastest depends on the processor, on a layer's shape and on how many rows
(tokens) share one reading of the weights, so `pack_linears` measures on the model at hand and keeps the
winner for each shape: one for a single row, and another for many where that pays.
"""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from engine.layers.replace import linear_names, replace_linears
from engine.models.weights import Module

CROWDING = 1.15  # what fp32 weights lose in use, where keys and values want the same caches
OTHERS = 2**24  # bytes that are touched between two passes over the weights
WORTH = 0.9  # a second form takes memory, so it must need less than this share of the first one's time

# The leanest way into FBGEMM is in torch 2.11 to 2.13 and announced to go; SharedHalf is the way that stays.
warnings.filterwarnings("ignore", message="fbgemm_.*fp16.* is deprecated")


class Half(Module):
    """Weights kept in fp16 and widened to fp32 as they are read (FBGEMM, on x86): half the bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
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


def pack_linears(model: nn.Module, rows: int = 1) -> nn.Module:
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
    # 1. Who wins at one row, who at many? Each form is dropped again: all at once might not fit into memory.
    at_one, at_many = {}, {}
    for form in (_as_it_is, *(form for form in FORMS if all(map(form.can_pack, linears)))):
        made = [form(linear) for linear in linears]
        at_one[form], at_many[form] = (_seconds_by_shape(linears, made, n) for n in (1, rows))
    few, many = {}, {}
    for shape in shapes:
        few[shape], many[shape] = (min(at, key=lambda form: at[form][shape]) for at in (at_one, at_many))
        if rows == 1 or at_one[few[shape]][shape] >= WORTH * at_one[many[shape]][shape]:
            few[shape] = many[shape]
    # 2. One form for the layers of a shape; or two, each for the numbers of rows at which it is the faster.
    chosen = [many[shape](linear) for shape, linear in zip(shapes, linears, strict=True)]
    if few != many:
        other = [
            few[shape](linear) if few[shape] is not many[shape] else its
            for shape, linear, its in zip(shapes, linears, chosen, strict=True)
        ]
        took = [[_seconds_by_shape(linears, made, size) for made in (other, chosen)] for size in SIZES]
        for i, (shape, mine, its) in enumerate(zip(shapes, other, chosen, strict=True)):
            if mine is not its:
                chosen[i] = ByRows([mine if one[shape] < another[shape] else its for one, another in took])
    place = dict(zip(linears, chosen, strict=True))
    return replace_linears(model, lambda name, layer: place.get(layer, layer))


def _as_it_is(linear: nn.Linear) -> nn.Module:
    return linear


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _seconds_by_shape(linears: list[nn.Linear], made: list[nn.Module], rows: int) -> dict[tuple, float]:
    """What the layers of each shape take of a step in this form, and what fp32 loses in use."""
    found: Counter = Counter()
    for linear, layer, took in zip(linears, made, _seconds_per_layer(linears, made, rows), strict=True):
        found[_shape(linear)] += took if isinstance(layer, (Half, SharedHalf)) else took * CROWDING
    return found


@torch.inference_mode()
def _seconds_per_layer(linears: list[nn.Linear], made: list[nn.Module], rows: int) -> list[float]:
    """Median of several passes over all layers in order, with other memory touched in between, so that the
    caches hold what they would in use. (In the best pass they hold more, and another form wins.)
    """
    others = torch.zeros(OTHERS, dtype=torch.uint8)
    inputs = [torch.ones(rows, linear.in_features).to(linear.weight) for linear in linears]
    passes: list[list[float]] = []
    while len(passes) < 3 or (len(passes) < 10 and sum(map(sum, passes)) < 0.03):
        others.add_(1)
        times = [time.perf_counter()]
        for layer, x in zip(made, inputs, strict=True):
            layer(x)
            times.append(time.perf_counter())
        passes.append([end - start for start, end in pairwise(times)])
    return list(map(median, zip(*passes, strict=True)))


def _bias(linear: nn.Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _is_fp32_on_cpu(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
