"""The Triton kernels equal the plain products; without a GPU they run in the interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels import quantized_matmul
from engine.kernels.quantized_matmul import int4_linear, int8_linear
from engine.quantization.codes import pack_nibbles, quantize_groups, quantize_rows
from engine.quantization.gpu import MAX_CODE_ROWS, pack_int4, pack_int8
from engine.quantization.products import linear_by_groups, linear_by_rows
from tests.part17.touched import num_outside, touched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(64, 8), (100, 37), (1030, 5), (65, 33)]  # K, N: none divides every tile


def numbers(T, K, N):
    generator = torch.Generator().manual_seed(T * K + N)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in ((T, K), (N, K), (N,))]


def close(got, want, rule):
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), atol=2e-3, rtol=2e-3), rule


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 2, 17, MAX_CODE_ROWS + 1])
def test_int8(shape, T):
    x, weight, bias = numbers(T, *shape)
    codes, scale = quantize_rows(weight)
    close(
        pack_int8(codes, scale, bias).product(x),
        linear_by_rows(x, codes, scale, bias),
        "out = (codes · x) · scale + bias, for every row of W and of x, and no other",
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 2, 17, MAX_CODE_ROWS + 1])
@pytest.mark.parametrize("group_size", [32, 128])
def test_int4(shape, T, group_size):
    x, weight, bias = numbers(T, *shape)
    codes, scale, low = quantize_groups(weight, group_size)
    nibbles = pack_nibbles(codes)
    close(
        pack_int4(nibbles, scale, low, bias, group_size).product(x),
        linear_by_groups(x, nibbles, scale, low, bias, group_size),
        "out = Σ over groups of (codes · x) · scale + (sum of x) · low, + bias",
    )


@pytest.mark.parametrize("T", [1, 3])
def test_x_may_be_a_slice(T):
    """Rows that do not lie one behind the other."""
    x, weight, bias = numbers(T, 128, 6)
    x = torch.cat([x, x + 1], 1)[:, :128]
    codes, scale = quantize_rows(weight)
    close(int8_linear(x, codes, scale, bias), linear_by_rows(x, codes, scale, bias), "x is read by its rows")
    four, step, low = quantize_groups(weight, 32)
    operands = pack_nibbles(four), step, low, bias, 32
    close(int4_linear(x, *operands), linear_by_groups(x, *operands), "in four bits, too")


def test_what_lies_behind_x_is_not_read():
    """An odd number of inputs: the last byte has one code, and no number of x belongs to its upper half."""
    x, weight, bias = numbers(1, 65, 6)
    x = torch.cat([x, torch.full((1, 65), 1e4, device=DEVICE)], 1)[:, :65]
    four, step, low = quantize_groups(weight, 32)
    operands = pack_nibbles(four), step, low, bias, 32
    close(int4_linear(x, *operands), linear_by_groups(x, *operands), "x ends where its row does")


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_has_the_dtype_of_x_and_sums_are_in_fp32(T, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    x, weight, bias = numbers(T, 512, 4)
    x, bias = x.to(dtype), bias.to(dtype)
    codes, scale = quantize_rows(weight)
    got = int8_linear(x, codes, scale, bias)
    assert got.dtype == dtype
    want = linear_by_rows(x.float(), codes, scale, bias.float())
    assert torch.allclose(got.float(), want, atol=0.02, rtol=2e-3), "fp16 would lose 512 products' sum"
    four, step, low = quantize_groups(weight, 32)
    got = int4_linear(x, pack_nibbles(four), step, low, bias, 32)
    assert got.dtype == dtype
    want = linear_by_groups(x.float(), pack_nibbles(four), step, low, bias.float(), 32)
    assert torch.allclose(got.float(), want, atol=0.02, rtol=2e-3), "in four bits, too"


def test_the_kernel_is_chosen_by_rows(monkeypatch):
    """One row, up to MAX_CODE_ROWS, beyond: three ways."""
    used = []

    class Noting:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            used.append(self.name)
            return self.kernel[grid]

    for name in ("_int8_row", "_int8_tile", "_int4_row", "_int4_tile"):
        monkeypatch.setattr(quantized_matmul, name, Noting(name, getattr(quantized_matmul, name)))
    for T in (1, 2, MAX_CODE_ROWS, MAX_CODE_ROWS + 1):
        x, weight, bias = numbers(T, 64, 4)
        pack_int8(*quantize_rows(weight), bias).product(x)
        codes, scale, low = quantize_groups(weight, 32)
        pack_int4(pack_nibbles(codes), scale, low, bias, 32).product(x)
    assert used == ["_int8_row", "_int4_row"] + ["_int8_tile", "_int4_tile"] * 2


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter tells which addresses a kernel reads and writes")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 3])
def test_nothing_but_the_operands_is_read_or_written(shape, T):
    """A byte behind the last one may belong to nobody: a GPU then ends the whole process."""
    x, weight, bias = numbers(T, *shape)
    codes, scale = quantize_rows(weight)
    four, step, low = quantize_groups(weight, 32)
    for linear, operands, options in (
        (int8_linear, (x, codes, scale, bias), ()),
        (int4_linear, (x, pack_nibbles(four), step, low, bias), (32,)),
    ):
        with touched() as addresses:
            out = linear(*operands, *options)
        rule = f"{linear.__name__}: masks end where the operands end"
        assert num_outside(addresses, (*operands, out)) == 0, rule
