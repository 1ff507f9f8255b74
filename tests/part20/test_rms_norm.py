"""`RMSNorm.forward`, by hand, and in low precision."""

import pytest
import torch

from engine.models.llama import RMSNorm


def normed(x, weight=None, eps: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A norm with these weights (or ones), of x."""
    x = torch.tensor(x, dtype=dtype)
    norm = RMSNorm(x.shape[-1], eps=eps, dtype=dtype)
    norm.weight.data = (
        torch.ones(x.shape[-1], dtype=dtype) if weight is None else torch.tensor(weight, dtype=dtype)
    )
    with torch.inference_mode():
        return norm(x)


def numbers(x: torch.Tensor) -> list:
    return x.double().round(decimals=4).tolist()


def test_a_row_is_divided_by_its_root_mean_square():
    """(1 + 49) / 2 is 25, whose root is 5."""
    assert numbers(normed([[1.0, 7.0]])) == [[0.2, 1.4]], (
        "divided by the root of the mean of the squares, and no mean is taken away"
    )


def test_the_weight_is_a_factor():
    got = numbers(normed([[1.0, 7.0]], weight=[10.0, 100.0]))
    assert got == [[2.0, 140.0]], "the result is multiplied by the weight, as it is"


def test_each_row_and_each_head_by_itself():
    got = numbers(normed([[[1.0, 7.0], [10.0, 70.0]], [[7.0, 1.0], [0.1, 0.7]]]))
    want = [[[0.2, 1.4], [0.2, 1.4]], [[1.4, 0.2], [0.2, 1.4]]]
    assert got == want, "the mean is taken over the last axis alone: a row, or a head, by itself"


def test_epsilon_stands_under_the_root():
    """The mean of the squares of (0, 0, 0, 4) is 4, and √(4 + 5) is 3."""
    got = numbers(normed([[0.0, 0.0, 0.0, 4.0]], eps=5.0))
    assert got == [[0.0, 0.0, 0.0, 1.3333]], "epsilon is added to the mean of the squares, under the root"


def test_a_row_of_zeros_stays_one():
    assert numbers(normed([[0.0, 0.0]], eps=1e-6)) == [[0.0, 0.0]], "epsilon keeps 0 from being divided by 0"


def test_squares_are_fp32():
    """400 · 400 is 160,000, and fp16 ends at 65,504. The root of the mean is 250."""
    got = normed([[300.0, 400.0, 0.0, 0.0]], dtype=torch.float16)
    assert got.dtype == torch.float16, "the dtype stays"
    assert got.double().tolist()[0] == pytest.approx([1.2, 1.6, 0, 0], rel=1e-3), (
        "squares are summed in fp32: in fp16 they are infinite"
    )


def test_small_numbers_do_not_vanish_in_fp16():
    """0.0001 squared is less than fp16 can hold."""
    got = normed([[1e-4, -1e-4]], eps=1e-12, dtype=torch.float16)
    assert got.double().tolist()[0] == pytest.approx([1, -1], rel=1e-2), (
        "squares are summed in fp32: in fp16 they are 0"
    )
