"""Linear layers to pack or to replace, and packing that is told how long each form takes."""

import pytest
import torch
from torch import nn

from engine.layers import packed_linear
from engine.layers.packed_linear import Blocked, Half, SharedHalf

needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="fp16 packing is FBGEMM's, for x86 alone"
)
needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="blocked weights are oneDNN's"
)


def linear(inputs=24, outputs=40, bias=True, half=True, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    if half:
        made.weight.copy_(made.weight.half())
    return made


def timed(monkeypatch, seconds):
    """Packing is told how long each form takes for a layer: seconds(form, rows)."""
    monkeypatch.setattr(
        packed_linear,
        "_seconds_per_layer",
        lambda linears, made, rows: [seconds(type(layer), rows) for layer in made],
    )


def told_seconds(form: type, rows: int) -> float:
    """As on many machines: fp16 wins for few rows, with half the bytes to read; blocks of fp32 for many."""
    if form in (Half, SharedHalf):
        return 1 + 0.2 * rows + 0.1 * (form is SharedHalf)
    return 2 + 0.01 * rows + 0.1 * (form is not Blocked)


@pytest.fixture(scope="module", autouse=True)
def packing_asks_no_stopwatch():
    """For conftests to import: an engine that a test makes has the same forms of layers on any machine,
    however busy. To measure them would take most of the time in which a small engine is made.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        timed(monkeypatch, told_seconds)
        yield
