"""Linear layers whose weights are packed, at load, into the layout that this processor reads fastest. Part 3.

With a KV cache, a step computes little but reads every weight once. Promises the results of nn.Linear up to
fp32 rounding. The fastest layout depends on the processor, on the shape of the layer, and on the number of
rows (tokens) of a product. So `pack_linears` measures all layouts on the model's own layers, and takes the
fastest layout for each shape. A layer also keeps a second layout for few rows if that one is much faster for
a single row.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel, linear_names, replace_linears
from engine.models.weights import Module

# In a running engine, layers with fp32 weights take longer than measured here by this factor, because keys
# and values compete for the processor's caches.
FP32_SLOWDOWN = 1.15
OTHER_BYTES = 2**24  # bytes of other memory that are written between two passes over the weights
# A measurement takes at least MIN_PASSES passes over the layers, and goes on up to MAX_PASSES passes or until
# it has taken ENOUGH_SECONDS: short times vary most.
MIN_PASSES, MAX_PASSES, ENOUGH_SECONDS = 3, 10, 0.03
# A second form takes memory. It is kept only if, for a single row, its time is below this fraction of the
# first form's time.
MAX_SECOND_FORM_TIME = 0.9
Shape = tuple[int, int]  # (in, out) features of a linear layer
Form = Callable[[nn.Linear], nn.Module]  # makes a layer with the same results, mostly in another layout


class Half(Module):
    """Keeps weights in fp16, which halves the bytes, and converts them to fp32 as they are read.

    Uses FBGEMM's functions for x86 processors.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        _swallow_deprecation_warnings()
        self.packed, self.bias = torch.fbgemm_pack_gemm_matrix_fp16(linear.weight), _bias(linear)

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        """Whether this form exists on this machine and loses nothing: each weight must be exact in fp16.

        The bias stays in fp32.
        """
        return hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation") and _can_be_fp16(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


class SharedHalf(Module):
    """Keeps weights in fp16 as `Half` does, and splits a product over all threads.

    A call costs more than a call of `Half`, so this form is faster only for many rows or large layers.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        """Whether this form exists on this machine and loses nothing, as in `Half`."""
        return _can_be_fp16(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class Transposed(Module):
    """Keeps weights in fp32, transposed to [in, out].

    The output of a token is then a weighted sum of rows, which are read in the order of memory.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.detach().t().contiguous(), _bias(linear)  # [in, out], [out]

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        """Whether the layer's weights are fp32 on a CPU."""
        return _is_fp32_on_cpu(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.addmm(self.bias, x, self.weight)


class Blocked(Module):
    """Keeps weights in fp32, in the blocks that oneDNN's matrix product reads: faster for several rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(linear.weight), _bias(linear)

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        """Whether oneDNN is available, and the layer's weights are fp32 on a CPU."""
        return torch.backends.mkldnn.is_available() and _is_fp32_on_cpu(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class ByRows(Module):
    """One layer in several forms. The number of rows decides which form computes a product."""

    def __init__(self, by_size: Sequence[nn.Module]) -> None:
        """by_size[i] computes products of 2**i to 2**(i+1) - 1 rows.

        Its last form computes all larger ones.
        """
        super().__init__()
        # A tuple, which nn.Module does not search: no later transform replaces a linear layer in it.
        self.by_size = tuple(by_size)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        size_index = x.size(0).bit_length() - 1  # the i with 2**i <= T < 2**(i+1)
        return self.by_size[min(size_index, len(self.by_size) - 1)](x)


FORMS = (Half, SharedHalf, Transposed, Blocked)  # beside nn.Linear itself
SIZES = [2**i for i in range(8)]  # numbers of rows, from 1 to 128, at which two forms are compared


def pack_linears(model: AnyModel, rows: int = 1) -> AnyModel:
    """Replace the model's linear layers by their fastest lossless form, in place, and return the model.

    Layers of one shape get the same form: the fastest one for `rows` rows. They keep a second form if another
    form is much faster for a single row. Both forms are then measured at each size of SIZES. The faster form,
    or the form for `rows` if their times are equal, computes the products of this many rows, up to the next
    size.

    Use it as `load_model(..., transform=pack_linears)`. A model that is not fp32 on a CPU does not change,
    nor do layers that are no nn.Linear, nor shapes for which nn.Linear is the fastest. Takes up to two
    seconds per ten million weights.
    """
    layers = [model.get_submodule(name) for name in linear_names(model)]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    choices = _choose_forms(linears, rows)
    packed = [choices[_shape(linear)].for_rows(linear) for linear in linears]
    if any(choice.has_second for choice in choices.values()):
        packed = _with_second_form(linears, packed, choices)
    replacement: dict[nn.Module, nn.Module] = dict(zip(linears, packed, strict=True))
    return replace_linears(model, lambda name, layer: replacement.get(layer, layer))


class _Choice(NamedTuple):
    """The forms for the layers of one shape."""

    for_rows: Form  # the fastest form for the number of rows that `pack_linears` is given
    for_one_row: Form  # the same form, if a second form would not be worth its memory

    @property
    def has_second(self) -> bool:
        """Whether a layer keeps both forms."""
        return self.for_one_row is not self.for_rows


def _choose_forms(linears: list[nn.Linear], rows: int) -> dict[Shape, _Choice]:
    """The forms for the layers of each shape, by measuring each form that loses nothing."""
    possible_forms: list[Form] = [_unchanged]
    for layer_class in FORMS:
        if all(layer_class.can_pack(linear) for linear in linears):
            possible_forms.append(layer_class)
    # 1. The seconds of the layers of each shape, with all layers in one form.
    seconds_at_one_row: dict[Form, dict[Shape, float]] = {}
    seconds_at_rows: dict[Form, dict[Shape, float]] = {}
    for form in possible_forms:
        packed: list[nn.Module] = [form(linear) for linear in linears]
        seconds_at_one_row[form] = _seconds_by_shape(linears, packed, rows=1)
        seconds_at_rows[form] = _seconds_by_shape(linears, packed, rows)
        del packed  # before the next form's layers are made: both might not fit into memory
    # 2. Choose the fastest form for each shape.
    choices: dict[Shape, _Choice] = {}
    for shape in {_shape(linear) for linear in linears}:
        for_rows = _fastest(seconds_at_rows, shape)
        for_one_row = _fastest(seconds_at_one_row, shape)
        max_seconds = MAX_SECOND_FORM_TIME * seconds_at_one_row[for_rows][shape]
        if rows == 1 or seconds_at_one_row[for_one_row][shape] >= max_seconds:
            for_one_row = for_rows  # a second form is not worth its memory
        choices[shape] = _Choice(for_rows, for_one_row)
    return choices


def _with_second_form(
    linears: list[nn.Linear], packed: list[nn.Module], choices: dict[Shape, _Choice]
) -> list[nn.Module]:
    """`packed`, but each layer whose shape has a second form has both forms (`ByRows`). Which form computes
    which number of rows is measured.
    """
    second: list[nn.Module] = []  # the layers in the form for a single row
    for linear, layer in zip(linears, packed, strict=True):
        choice = choices[_shape(linear)]
        second.append(choice.for_one_row(linear) if choice.has_second else layer)
    second_is_faster: dict[Shape, list[bool]] = {shape: [] for shape in choices}  # at each of SIZES
    for num_rows in SIZES:
        # One after the other, so that a slow moment of the machine slows both.
        first_seconds = _seconds_by_shape(linears, packed, num_rows)
        second_seconds = _seconds_by_shape(linears, second, num_rows)
        for shape in choices:
            second_is_faster[shape].append(second_seconds[shape] < first_seconds[shape])
    combined: list[nn.Module] = []
    for linear, first_layer, second_layer in zip(linears, packed, second, strict=True):
        if second_layer is first_layer:
            combined.append(first_layer)
        else:
            is_faster = second_is_faster[_shape(linear)]
            combined.append(ByRows([second_layer if faster else first_layer for faster in is_faster]))
    return combined


@cache
def _swallow_deprecation_warnings() -> None:
    """Call FBGEMM's two functions for fp16 once, and ignore their deprecation warnings.

    Torch 2.11 to 2.13 have both functions and announce their removal; `SharedHalf` does not need them. Torch
    warns at the first call of each function only, so no warning filter has to stay in the user's process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fbgemm_.*fp16.* is deprecated")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
        torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), packed, torch.zeros(1))


def _unchanged(linear: nn.Linear) -> nn.Module:
    """The form of a layer that is not replaced."""
    return linear


def _fastest(seconds: dict[Form, dict[Shape, float]], shape: Shape) -> Form:
    """The form with the smallest seconds[form][shape]."""
    return min(seconds, key=lambda form: seconds[form][shape])


def _shape(linear: nn.Linear) -> Shape:
    """(in, out) features of the layer."""
    return linear.in_features, linear.out_features


def _seconds_by_shape(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> dict[Shape, float]:
    """The seconds that the layers of each shape take in one step of `rows` rows.

    `packed` are the layers `linears` in one form. The times of fp32 weights are multiplied by FP32_SLOWDOWN.
    """
    total: defaultdict[Shape, float] = defaultdict(float)
    times = _seconds_per_layer(linears, packed, rows)
    for linear, layer, seconds in zip(linears, packed, times, strict=True):
        is_fp16 = isinstance(layer, Half | SharedHalf)
        total[_shape(linear)] += seconds if is_fp16 else seconds * FP32_SLOWDOWN
    return total


@torch.inference_mode()
def _seconds_per_layer(linears: list[nn.Linear], packed: list[nn.Module], rows: int) -> list[float]:
    """The seconds of each layer of `packed` for `rows` rows: the median of several passes over all layers.

    Other memory is written between two passes, so that the processor's caches hold about what they hold in a
    running engine. In the fastest pass the caches hold more weights, and another form would win.
    """
    other_memory = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    inputs = [torch.ones(rows, linear.in_features).to(linear.weight) for linear in linears]
    passes: list[list[float]] = []  # of each pass, the seconds of each layer
    total = 0.0  # seconds of all passes
    while len(passes) < MIN_PASSES or (len(passes) < MAX_PASSES and total < ENOUGH_SECONDS):
        other_memory.add_(1)
        times = [time.perf_counter()]
        for layer, x in zip(packed, inputs, strict=True):
            layer(x)
            times.append(time.perf_counter())
        seconds_of_layers = [end - start for start, end in pairwise(times)]
        passes.append(seconds_of_layers)
        total += sum(seconds_of_layers)
    return [median(seconds_of_one_layer) for seconds_of_one_layer in zip(*passes, strict=True)]


def _bias(linear: nn.Linear) -> Tensor:
    """[out]: the layer's bias, or zeros if it has none."""
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _can_be_fp16(linear: nn.Linear) -> bool:
    """Whether this processor multiplies by fp16 weights, and each of the layer's weights is exact in fp16."""
    weight = linear.weight
    return (
        torch.backends.quantized.engine in ("x86", "fbgemm")
        and _is_fp32_on_cpu(linear)
        and torch.equal(weight.half().float(), weight)
    )


def _is_fp32_on_cpu(linear: nn.Linear) -> bool:
    """Whether the layer's weights are fp32 on a CPU."""
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
