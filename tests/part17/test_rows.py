"""A scale for each row, and the nearest code for each weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.quantization.codes import quantize_rows


def test_the_worked_example_of_the_article():
    weight = torch.tensor([[0.50, -1.27, 0.02, 0.00], [6.00, 12.70, -0.30, 0.04]])
    codes, scale = quantize_rows(weight)
    assert scale.tolist() == pytest.approx([0.01, 0.1]), "a row's scale is its largest magnitude by 127"
    assert codes.tolist() == [[50, -127, 2, 0], [60, 127, -3, 0]], (
        "a code is the nearest whole number of scales"
    )


def test_the_weights_stay_as_they_are():
    weight = torch.tensor([[0.50, -1.27], [6.00, 12.70]])
    before = weight.clone()
    quantize_rows(weight)
    assert torch.equal(weight, before), "the weights that came in are read, and not divided in their place"


def test_codes_are_bytes_and_scales_are_fp32():
    codes, scale = quantize_rows(torch.randn(3, 5, dtype=torch.bfloat16))
    assert codes.dtype == torch.int8, "a code is one byte: torch.int8"
    assert scale.dtype == torch.float32, "a scale is in fp32, whatever the weights are in"
    assert codes.shape == (3, 5)
    assert scale.shape == (3,), "one scale for each row"


def test_the_largest_magnitude_of_a_row_is_127_on_either_side():
    codes, _ = quantize_rows(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]))
    assert codes.abs().amax(1).tolist() == [127, 127], "a row's largest magnitude gets the code 127 or -127"
    assert codes[1, 0] == -127, "-128 is not used: the range is symmetric"


def test_a_large_row_does_not_coarsen_a_small_one():
    weight = torch.tensor([[0.001, 0.0005], [1000.0, 500.0]])
    codes, scale = quantize_rows(weight)
    by_hand = [0.001 / 127, 1000.0 / 127]
    assert scale.tolist() == pytest.approx(by_hand, rel=1e-5), (
        "a scale is the largest magnitude by 127, also where that is small: nothing is added"
    )
    assert codes[0].tolist() == codes[1].tolist(), "each row has a scale of its own"


def test_a_row_of_zeros_stays_zero():
    codes, scale = quantize_rows(torch.zeros(2, 3))
    assert not codes.any(), "zeros have the code 0"
    assert scale.tolist() == [1, 1], "a row of zeros has the scale 1: nothing is divided by 0"


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1e-6, 0.02, 1.0, 1e4]))
def test_an_element_is_wrong_by_half_its_scale_at_most(seed, N, K, size):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * size
    codes, scale = quantize_rows(weight)
    error = (codes * scale[:, None] - weight).abs()
    assert (error <= scale[:, None] * 0.5001).all(), "a code is the nearest there is: within half a scale"
