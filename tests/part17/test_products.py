"""The plain products equal a linear layer with the weights that the codes stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.quantization.codes import dequantize_groups, pack_nibbles, quantize_groups, quantize_rows
from engine.quantization.products import (
    linear_by_groups,
    linear_by_rows,
    linear_of_codes,
    quantize_activations,
)


class Made(TorchDispatchMode):
    """Keeps every floating-point tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            self.tensors.append(given.detach().clone())
        return given


SHAPES = [(1, 8, 4), (3, 64, 5), (2, 100, 7), (5, 65, 3), (0, 8, 4)]  # T, K, N


def numbers(T, K, N):
    generator = torch.Generator().manual_seed(T * K + N)
    return [torch.randn(shape, generator=generator) for shape in ((T, K), (N, K), (N,))]


@pytest.mark.parametrize("shape", SHAPES)
def test_by_rows(shape):
    x, weight, bias = numbers(*shape)
    codes, scale = quantize_rows(weight)
    want = F.linear(x, codes * scale[:, None], bias)
    torch.testing.assert_close(linear_by_rows(x, codes, scale, bias), want, atol=1e-4, rtol=1e-4)


SCALES, LOWS, NONE = [0.5, 2.0, 1.0], [1.0, 0.0, 3.0], [0.0, 0.0, 0.0]  # of three groups, the last one short


@pytest.mark.parametrize(
    ("scale", "low", "bias", "want", "rule"),
    [
        (SCALES, NONE, 0.0, 5 * 0.5 + 25 * 2 + 25 * 1, "each group adds (sum of x · code) · its own scale"),
        (NONE, LOWS, 0.0, 3 * 1 + 7 * 0 + 5 * 3, "each group adds (sum of x) · its own low"),
        (NONE, NONE, 100.0, 100, "the bias comes once"),
        (SCALES, LOWS, 100.0, 100 + 77.5 + 18, "all of it together"),
    ],
    ids=["scale", "low", "bias", "all"],
)
def test_by_groups_by_hand(scale, low, bias, want, rule):
    """One term after the other. x and codes are 1 to 5, in groups of two: the last has one code."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    nibbles = torch.tensor([[1 + 16 * 2, 3 + 16 * 4, 5]], dtype=torch.uint8)
    got = linear_by_groups(x, nibbles, torch.tensor([scale]), torch.tensor([low]), torch.tensor([bias]), 2)
    assert got.tolist() == [[want]], rule


def test_the_weights_are_never_made():
    """Codes 5 and 9 in two groups: the weights are 1.05 and 2.53, and without the low 1.85 and 3.33."""
    scale, low, codes = 0.37, -0.8, (5, 9)
    weights = torch.tensor([low + code * scale for code in codes] + [code * scale for code in codes])
    x = torch.tensor([[40.0, 60.0, 70.0, 90.0]])  # so large that no sum is as small as a weight
    nibbles = torch.full((3, 2), codes[0] + 16 * codes[1], dtype=torch.uint8)
    of_groups = torch.ones(3, 2)
    with Made() as made:
        linear_by_groups(x, nibbles, scale * of_groups, low * of_groups, torch.zeros(3), 2)
    numbers = torch.cat([tensor.flatten().float() for tensor in made.tensors])
    assert (numbers[:, None] - weights).abs().min() > 1e-3, (
        "no weight is made: the sum of x · code is multiplied by the scale, and the sum of x by the low"
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [2, 32, 64])
def test_by_groups(shape, group_size):
    x, weight, bias = numbers(*shape)
    codes, scale, low = quantize_groups(weight, group_size)
    want = F.linear(x, dequantize_groups(codes, scale, low, group_size), bias)
    got = linear_by_groups(x, pack_nibbles(codes), scale, low, bias, group_size)
    torch.testing.assert_close(
        got, want, atol=1e-4, rtol=1e-4, msg="it equals a linear layer with these weights"
    )


@pytest.mark.parametrize("most", [127, 63])
def test_activations_are_quantized_row_by_row(most):
    x = torch.tensor([[1.0, -2.0, 0.5], [100.0, 50.0, 0.1], [0.0, 0.0, 0.0]])
    codes, scale = quantize_activations(x, most)
    assert codes.abs().amax(1).tolist() == [most, most, 0], "a row's largest magnitude gets the last code"
    assert ((codes * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all(), "within half a scale"
    assert scale[2] == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_of_codes(shape):
    x, weight, bias = numbers(*shape)
    codes, scale = quantize_rows(weight)
    x_codes, x_scale = quantize_activations(x, 127)
    want = F.linear(x_codes * x_scale[:, None], codes * scale[:, None], bias)
    got = linear_of_codes(x_codes, x_scale, codes, scale, bias)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_x(dtype):
    x, weight, bias = numbers(3, 64, 5)
    codes, scale, low = quantize_groups(weight, 32)
    got = linear_by_groups(x.to(dtype), pack_nibbles(codes), scale, low, bias.to(dtype), 32)
    assert got.dtype == dtype, "the result has the dtype of x"
    rows, row_scale = quantize_rows(weight)
    assert linear_by_rows(x.to(dtype), rows, row_scale, bias.to(dtype)).dtype == dtype


def test_sums_are_in_fp32():
    """A sum of x · code may be larger than fp16 can hold where the result is not."""
    x, bias = torch.full((1, 64), 128.0, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)
    rule = "sums are in fp32: in fp16 they end at 65,504"
    nibbles = torch.full((1, 32), 15 + 16 * 15, dtype=torch.uint8)
    scale, low = torch.tensor([[2.0**-7]]).half(), torch.tensor([[-(2.0**-4)]]).half()
    by_groups = linear_by_groups(x, nibbles, scale, low, bias, 64)
    assert by_groups.tolist() == [[64 * 128 * 15 / 2**7 - 64 * 128 / 2**4]], rule
    codes = torch.full((1, 64), 127, dtype=torch.int8)
    by_rows = linear_by_rows(x, codes, torch.tensor([2.0**-11]), bias)
    assert by_rows.tolist() == [[64 * 128 * 127 / 2**11]], rule
