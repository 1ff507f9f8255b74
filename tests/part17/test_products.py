"""The plain products equal a linear layer with the weights that the codes stand for."""

import pytest
import torch
import torch.nn.functional as F

from engine.quantization.codes import dequantize_groups, pack_nibbles, quantize_groups, quantize_rows
from engine.quantization.products import (
    linear_by_groups,
    linear_by_rows,
    linear_of_codes,
    quantize_activations,
)

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


def test_by_groups_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    packed = torch.tensor([[1 + 16 * 2, 3 + 16 * 4, 5]], dtype=torch.uint8)  # codes 1, 2, 3, 4, 5
    scale, low = torch.tensor([[0.5, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 3.0]])
    got = linear_by_groups(x, packed, scale, low, torch.tensor([100.0]), 2)
    first, second, third = (1 + 4) * 0.5 + 3 * 1, (9 + 16) * 2 + 7 * 0, 25 * 1 + 5 * 3
    assert got.tolist() == [[100 + first + second + third]], (
        "a group adds (sum of x · code) · scale + (sum of x) · low, and the bias comes once"
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
    packed = torch.full((1, 32), 15 + 16 * 15, dtype=torch.uint8)
    scale, low = torch.tensor([[2.0**-7]]).half(), torch.tensor([[-(2.0**-4)]]).half()
    by_groups = linear_by_groups(x, packed, scale, low, bias, 64)
    assert by_groups.tolist() == [[64 * 128 * 15 / 2**7 - 64 * 128 / 2**4]], rule
    codes = torch.full((1, 64), 127, dtype=torch.int8)
    by_rows = linear_by_rows(x, codes, torch.tensor([2.0**-11]), bias)
    assert by_rows.tolist() == [[64 * 128 * 127 / 2**11]], rule
