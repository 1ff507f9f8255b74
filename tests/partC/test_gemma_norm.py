"""Gemma's norm, by hand, and in low precision."""

import torch

from engine.models.gemma import RMSNorm


def normed(x, weight, eps: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.tensor(x, dtype=dtype)
    norm = RMSNorm(x.shape[-1], eps=eps, dtype=dtype)
    norm.weight.data = torch.tensor(weight, dtype=dtype)
    with torch.inference_mode():
        return norm(x)


def numbers(x: torch.Tensor) -> list:
    return x.double().round(decimals=4).tolist()


def test_a_weight_of_zero_changes_nothing():
    """(1 + 49) / 2 is 25, whose root is 5."""
    got = numbers(normed([[1.0, 7.0]], weight=[0.0, 0.0]))
    assert got == [[0.2, 1.4]], "Gemma stores what a gain is more than 1: a weight of 0 is a gain of 1"


def test_the_gain_is_one_more_than_the_weight():
    got = numbers(normed([[1.0, 7.0], [10.0, 70.0]], weight=[9.0, -0.5]))
    want = [[2.0, 0.7]] * 2
    assert got == want, "each row is divided by its own root mean square, and multiplied by 1 + weight"


def test_eps_is_added_under_the_root():
    got = numbers(normed([[1.0, 7.0]], weight=[0.0, 0.0], eps=11.0))
    assert got == [[0.1667, 1.1667]], "25 + 11 is 36, whose root is 6"


def test_each_row_is_normed_by_itself_whatever_the_shape():
    """Queries come as [T, D] here, and the docstring says x[..., D]."""
    got = normed([[[1.0, 7.0]], [[10.0, 70.0]]], weight=[9.0, -0.5])
    assert got.shape == (2, 1, 2), "the shape of x stays"
    assert numbers(got) == [[[2.0, 0.7]]] * 2, "the mean is over the last axis, D"


def test_the_weight_stays_as_it_is():
    norm = RMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([9.0, -0.5])
    with torch.inference_mode():
        first, second = norm(torch.tensor([[1.0, 7.0]])), norm(torch.tensor([[1.0, 7.0]]))
    assert torch.equal(first, second), "1 is added in each pass, and not to the weight that is kept"


def test_one_plus_a_small_weight_is_not_rounded_to_one():
    """In bfloat16 1 + 0.0037 would be 1, and the result 1.3984375."""
    got = normed([[1.0, 7.0]], weight=[0.0, 0.0037], dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16, "the result has the dtype of x"
    assert float(got[0, 1]) == 1.40625, "1 + weight is computed in fp32"


def test_only_the_result_is_rounded():
    x = torch.linspace(-3, 5, 64).bfloat16()
    weight = torch.linspace(-0.5, 2, 64).bfloat16()
    wide = x.float() / x.float().square().mean().sqrt()
    want = (wide * (1.0 + weight.float())).bfloat16()
    got = normed(x.tolist(), weight.tolist(), dtype=torch.bfloat16)
    assert torch.equal(got, want), "x / root is multiplied in fp32, and only the product is rounded"
