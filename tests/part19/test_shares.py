"""Sharing out a whole number: nothing lost, nobody a whole unit away from the exact share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.telemetry.shares import MAX_WEIGHT, Weights, share_out
from tests.part01.outcome import outcome


def test_what_divides_evenly_is_divided_by_the_weights():
    assert share_out(100, [3, 1]) == [75, 25], "weights 3 and 1: three quarters and one quarter"


def test_the_parts_add_up():
    parts = share_out(7, [2, 3, 1])  # exactly 2⅓, 3½ and 1⅙
    assert sum(parts) == 7, f"{parts}: the parts must add up to what was shared out, 7"
    parts = share_out(2, [1, 1, 1, 1])  # exactly ½ each
    assert sum(parts) == 2, f"{parts}: the parts must add up to what was shared out, 2"


def test_what_is_left_over_goes_to_the_largest_remainder():
    assert share_out(7, [2, 3, 1]) == [2, 4, 1], "of 2⅓, 3½ and 1⅙, the ½ is the largest remainder"
    assert share_out(1, [5, 6, 4]) == [0, 1, 0], "the largest remainder has the one that is left over"
    assert share_out(2, [5, 3]) == [1, 1], (
        "exactly 1¼ and ¾: what is left over goes to the largest remainder, not to the largest weight"
    )


def test_what_is_left_over_goes_out_in_ones():
    assert share_out(10, [1, 1, 1, 1]) == [3, 3, 2, 2], (
        "two are left over: nobody gets both, and of equal remainders the earliest go first"
    )


def test_a_weight_of_nothing_gets_nothing():
    assert share_out(10, [0, 1, 0, 2]) == [0, 3, 0, 7], "a weight of 0 gets 0"


def test_large_numbers_are_exact():
    total = 10**30 + 1
    assert share_out(total, [1, 1]) == [total // 2 + 1, total // 2], "whole numbers, not floats: exact"
    assert share_out(5 * 10**16, [1, 10**17]) == [0, 5 * 10**16], (
        "remainders are whole numbers, too: the second is the larger one, by less than a float can tell"
    )


def test_nothing_to_share_is_nothing_for_everybody():
    assert share_out(0, [3, 4]) == [0, 0]
    for weights in ([0, 0], []):
        try:
            parts = share_out(0, weights)
        except ZeroDivisionError:
            parts = None
        assert parts == [0] * len(weights), "nothing to share, and nobody with a weight: all get 0"


@pytest.mark.parametrize(("total", "weights"), [(1, [0, 0]), (1, []), (-1, [1]), (5, [3, -1])])
def test_what_cannot_be_shared_is_refused(total, weights):
    said = outcome(share_out, total, weights)
    assert str(said).startswith("ValueError"), (
        "nothing below 0 is shared out, by no weight below 0, and something is not shared by weights of 0: "
        f"share_out({total}, {weights}) is refused with a ValueError, not {said}"
    )
    assert f"total={total}" in said, f"the error says total={total}: {said}"


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_any_total_among_any_weights(total, weights):
    if not sum(weights):
        return
    parts = share_out(total, weights)
    assert sum(parts) == total, "the parts add up"
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights), (
            "less than a whole unit away from the exact share"
        )
    # (remainder, the earliest first) of those who got one more than their share rounded down, and of the rest
    ranks: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        rounded_down, remainder = divmod(total * weight, sum(weights))
        ranks[part > rounded_down].append((remainder, -i))
    if ranks[True] and ranks[False]:
        assert min(ranks[True]) > max(ranks[False]), (
            "the larger remainder comes first; of equals, the earliest"
        )


@pytest.mark.parametrize(
    "wrong",
    [{"input": 0}, {"output": 0}, {"held": -1}, {"input": 1.5}, {"output": MAX_WEIGHT + 1}, {"held": True}],
)
def test_weights_are_whole_nanoseconds_within_bounds(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"weight {name}=.* whole number of nanoseconds from"):
        Weights(**wrong)
