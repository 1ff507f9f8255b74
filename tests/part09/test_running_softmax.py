"""`RunningSoftmax.add`, from one tile by hand up to any cut of any scores."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.tiled import RunningSoftmax
from tests.part01.outcome import outcome

# The article's four keys, in two tiles of two: e^score is 1, 2 and 4, 1.
FIRST, SECOND = ([log(1), log(2)], [4.0, 8.0]), ([log(4), log(1)], [12.0, 0.0])


def taken_in(*tiles: tuple[list[float], list[float]]) -> RunningSoftmax:
    """One row, one head, values of one number."""
    softmax = RunningSoftmax(1, 1, 1)
    for scores, values in tiles:
        error = outcome(softmax.add, torch.tensor(scores).view(1, 1, -1), torch.tensor(values).view(1, -1, 1))
        assert error is None, f"add raised, or returned, {error}"
    for name in ("maximum", "total", "weighted"):
        shape = list(getattr(softmax, name).shape)
        assert shape == [1, 1, 1], f"`{name}` has a row for each row of scores, [1, 1, 1] here, not {shape}"
    return softmax


def number(x: Tensor) -> float:
    return round(float(x), 4)


def plain(scores: Tensor, values: Tensor) -> Tensor:
    """scores[H, R, N], values[H, N, Dh], all at once, in double precision."""
    return (scores.double().softmax(-1) @ values.double()).float()


# One tile.


def test_the_maximum_of_one_tile_is_its_largest_score():
    assert number(taken_in(FIRST).maximum) == number(torch.tensor(log(2))), (
        "maximum: the largest score so far"
    )


def test_the_total_of_one_tile_is_relative_to_its_largest_score():
    assert number(taken_in(FIRST).total) == 1.5, (
        "total: the sum of exp(score - maximum); for scores ln 1 and ln 2 that is 1/2 + 1"
    )


def test_the_weighted_sum_of_one_tile_has_each_value_times_its_term():
    assert number(taken_in(FIRST).weighted) == 10, (
        "weighted: each value times exp(score - maximum); for values 4 and 8 that is 1/2 · 4 + 1 · 8"
    )


# A second tile, with a larger score.


def test_the_maximum_grows_with_a_larger_score():
    assert number(taken_in(FIRST, SECOND).maximum) == number(torch.tensor(log(4))), (
        "maximum: the largest score of all tiles so far"
    )


def test_a_new_maximum_shrinks_the_total():
    assert number(taken_in(FIRST, SECOND).total) == 2, (
        "a new maximum: the old total, 1.5, was relative to ln 2, is halved for ln 4, and 1 + 1/4 is added"
    )


def test_a_new_maximum_shrinks_the_weighted_sum_too():
    assert number(taken_in(FIRST, SECOND).weighted) == 17, (
        "a new maximum: the old weighted sum, 10, is halved like the total; then 1 · 12 + 1/4 · 0 is added"
    )


def test_the_mean_is_that_of_a_softmax_over_all_keys():
    assert number(taken_in(FIRST, SECOND).mean()) == 8.5, (
        "(1·4 + 2·8 + 4·12 + 1·0) / 8, as a softmax of all four gives"
    )


# Other orders, hidden keys, numbers that are too large.


def test_a_later_tile_of_smaller_scores_leaves_the_maximum_as_it_was():
    softmax = taken_in(SECOND, FIRST)
    assert number(softmax.maximum) == number(torch.tensor(log(4))), (
        "maximum: of all tiles so far, not the last one's"
    )
    assert number(softmax.mean()) == 8.5, "the order of tiles does not matter"


def test_a_hidden_key_has_no_weight():
    softmax = taken_in(([0.0, -torch.inf], [3.0, 100.0]), ([-torch.inf, -torch.inf], [100.0, 100.0]))
    assert number(softmax.mean()) == 3, (
        "a score of -inf weighs nothing, also where a whole later tile is hidden"
    )


@pytest.mark.parametrize("scores", [(1000.0, 0.0), (0.0, 1000.0), (-1000.0, 1000.0), (-2000.0, -1000.0)])
def test_no_exponential_overflows(scores):
    softmax = taken_in(*(([score], [float(i)]) for i, score in enumerate(scores)))
    want = float(scores[1] > scores[0])
    assert number(softmax.mean()) == want, (
        f"scores {scores}, a tile each: exponentials are of a score minus the largest so far; none overflows"
    )


def test_rows_and_heads_have_each_their_own_maximum():
    softmax = RunningSoftmax(2, 2, 1)
    scores = torch.tensor([[[0.0, 1.0], [200.0, 201.0]], [[-300.0, -299.0], [400.0, 401.0]]])  # [H, R, N]
    values = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])  # [H, N, Dh]
    softmax.add(scores, values)
    assert torch.allclose(softmax.mean(), plain(scores, values), atol=1e-5), (
        "each row of each head has a maximum of its own: relative to another row's, all its terms may be 0"
    )


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 10**6), st.sampled_from([1.0, 30.0])
)
def test_any_cut_into_tiles_gives_the_softmax_of_all(widths, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, sum(widths), generator=generator) * scale
    values = torch.randn(2, sum(widths), 4, generator=generator)
    softmax = RunningSoftmax(2, 3, 4)
    for tile, own in zip(scores.split(widths, dim=2), values.split(widths, dim=1), strict=True):
        softmax.add(tile, own)
    assert torch.allclose(softmax.mean(), plain(scores, values), atol=1e-5), (
        f"tiles of {widths} keys: the mean is not that of a softmax over all keys at once"
    )
