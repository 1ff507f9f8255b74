"""A scale and a low for each group of a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.quantization import codes as module
from engine.quantization.codes import dequantize_groups, quantize_groups


def random(N, K, seed=0):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def plain(monkeypatch):
    """Only the whole range is tried."""
    monkeypatch.setattr(module, "RANGE_SHARES", (1.0,))


def test_the_worked_example_of_the_article(monkeypatch):
    plain(monkeypatch)
    weight = torch.tensor([[-0.5, 0.25, 0.5, 3.25]])
    codes, scale, low = quantize_groups(weight, 4)
    assert low.tolist() == [[-0.5]], "low is the group's smallest weight"
    assert scale.tolist() == [[0.25]], "scale is a fifteenth of the range: (3.25 + 0.5) / 15"
    assert codes.tolist() == [[0, 3, 4, 15]], "a code counts scales above low"


def test_each_group_has_its_own_range(monkeypatch):
    plain(monkeypatch)
    codes, scale, _ = quantize_groups(torch.tensor([[0.0, 15.0, 0.0, 150.0]]), 2)
    assert scale.tolist() == [[1, 10]], "two groups of two, two scales"
    assert codes.tolist() == [[0, 15, 0, 15]]


def test_the_last_group_may_be_shorter(monkeypatch):
    plain(monkeypatch)
    codes, scale, low = quantize_groups(torch.tensor([[1.0, 16.0, 7.0]]), 2)
    assert (codes.shape, scale.shape, low.shape) == ((1, 3), (1, 2), (1, 2)), "ceil(K / group_size) groups"
    assert low[0, 1] == 7, "a group of one weight is that weight"
    assert dequantize_groups(codes, scale, low, 2).tolist() == [[1, 16, 7]]


def test_equal_weights_have_scale_0():
    codes, scale, low = quantize_groups(torch.full((1, 4), 0.3), 4)
    back = dequantize_groups(codes, scale, low, 4)
    assert scale.tolist() == [[0]]
    assert back.tolist() == [[pytest.approx(0.3, abs=2e-4)] * 4], "a group without a range is its low"


def test_kept_numbers_are_fp16_and_codes_fit_four_bits():
    codes, scale, low = quantize_groups(random(4, 64), 32)
    assert (scale.dtype, low.dtype, codes.dtype) == (torch.float16, torch.float16, torch.uint8)
    assert int(codes.max()) <= 15


@given(
    st.integers(0, 2**31), st.sampled_from([2, 32, 64]), st.integers(1, 130), st.sampled_from([0.02, 1, 100])
)
def test_an_element_inside_its_range_is_wrong_by_half_a_scale_at_most(seed, group_size, K, size):
    weight = random(3, K, seed) * size
    codes, scale, low = quantize_groups(weight, group_size)
    steps = scale.float().repeat_interleave(group_size, 1)[:, :K]
    least = low.float().repeat_interleave(group_size, 1)[:, :K]
    error = (dequantize_groups(codes, scale, low, group_size) - weight).abs()
    inside = (weight >= least) & (weight <= least + 15 * steps)
    assert (error <= steps * 0.501)[inside].all(), "codes are the nearest for the scale and low that are kept"
    ends = torch.where(codes == 0, 0, 15)
    assert (codes == ends)[~inside].all(), "outside, the code is the end that is nearer"


def test_clipping_one_weight_far_out_serves_the_others():
    weight = random(1, 64) * 0.02
    weight[0, 5] = 0.12
    codes, scale, low = quantize_groups(weight, 64)
    whole = float(weight.max() - weight.min()) / 15
    assert float(scale) < 0.99 * whole, "a narrower range is taken where its squared error is smaller"
    tried = (dequantize_groups(codes, scale, low, 64) - weight).square().sum()
    steps = ((weight - weight.min()) / whole).round() * whole + weight.min()
    assert tried < (steps - weight).square().sum()


def test_it_is_never_worse_than_the_whole_range(monkeypatch):
    weight = random(16, 256)
    best = (dequantize_groups(*quantize_groups(weight, 64), 64) - weight).square().view(16, 4, 64).sum(2)
    plain(monkeypatch)
    whole = (dequantize_groups(*quantize_groups(weight, 64), 64) - weight).square().view(16, 4, 64).sum(2)
    assert (best <= whole * 1.0001).all(), "group by group, the range with the smallest error stays"
    assert (best < whole * 0.99).any()


@pytest.mark.parametrize("weight", [7e4, -7e4])
def test_a_weight_that_fp16_cannot_hold_is_refused(weight):
    with pytest.raises(ValueError, match=r"a weight of 70000: up to 65,504 are accepted"):
        quantize_groups(torch.tensor([[1.0, weight]]), 2)
