"""Linear layers whose weights are laid out once, at load, for the processor that will read them. Part 3.

With a cache, a step computes little and reads every weight once: its time is bytes over bandwidth. Promises
the same result as nn.Linear up to fp32 rounding. Which layout is fastest depends on the processor and on how
many rows (tokens) share one reading of the weights, so `pack_linears` measures on the model at hand and keeps
the winner.
"""

import time
import warnings

import torch
from torch import Tensor, nn

from engine.layers.replace import linear_names, replace_linears

CROWDING = 1.15  # what fp32 weights lose in use, where keys and values want the same caches

# The leanest way into FBGEMM is in torch 2.11 to 2.13 and announced to go; SharedHalf is the way that stays.
warnings.filterwarnings("ignore", message="fbgemm_.*fp16.* is deprecated")


class Half(nn.Module):
    """Weights kept in fp16 and widened to fp32 as they are read (FBGEMM, on x86): half the bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.fbgemm_pack_gemm_matrix_fp16(linear.weight)
        self.bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias

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


class SharedHalf(nn.Module):
    """The same split over all threads: dearer per call, so it pays for many rows or large layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)

    can_pack = staticmethod(Half.can_pack)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class Blocked(nn.Module):
    """Weights in fp32, reordered into the blocks oneDNN's matrix product reads: pays from several rows on."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
        self.bias = linear.bias

    @staticmethod
    def can_pack(linear: nn.Linear) -> bool:
        return torch.backends.mkldnn.is_available() and _is_fp32_on_cpu(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linears(model: nn.Module, rows: int = 1) -> nn.Module:
    """Replace the model's linear layers by their fastest lossless form for steps of `rows` tokens, in place.

    For `load_model(..., transform=pack_linears)`. Leaves a model alone that is not in fp32 on a CPU, or for
    which nothing beats nn.Linear. Takes a fraction of a second per million weights.
    """
    layers = [model.get_submodule(name) for name in linear_names(model)]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]  # the quantized ones are packed
    seconds = {None: _seconds_per_step(linears, linears, rows)}
    for form in (Half, SharedHalf, Blocked):
        if all(form.can_pack(linear) for linear in linears):
            seconds[form] = _seconds_per_step(linears, [form(linear) for linear in linears], rows)
    for form in {None, Blocked} & seconds.keys():
        seconds[form] *= CROWDING
    best = min(seconds, key=seconds.get)
    if best is None:
        return model
    return replace_linears(model, lambda name, layer: best(layer) if layer in linears else layer)


@torch.inference_mode()
def _seconds_per_step(linears: list[nn.Linear], candidates: list[nn.Module], rows: int) -> float:
    """Best of several passes over all layers in order, so that the caches hold what they would in use."""
    inputs = [torch.ones(rows, linear.in_features).to(linear.weight) for linear in linears]
    passes = []
    for _ in range(7):
        start = time.perf_counter()
        for candidate, x in zip(candidates, inputs, strict=True):
            candidate(x)
        passes.append(time.perf_counter() - start)
    return min(passes)


def _is_fp32_on_cpu(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
