"""Counting by buckets, and what can be read from the counts."""

import random
from bisect import bisect_left

import pytest

from engine.telemetry.histogram import Histogram, quantile
from tests.part01.outcome import outcome


def filled(bounds, values) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram


def test_a_value_that_equals_a_bound_is_within_it():
    histogram = filled((1, 2), [0.5, 1, 1.5, 2, 3])
    assert histogram.cumulative() == [2, 4, 5]
    assert histogram.sum == 8


def test_histograms_of_two_servers_add_up():
    one, two = filled((1, 2), [0.5, 3]), filled((1, 2), [1.5, 1.5, 9])
    together = [a + b for a, b in zip(one.cumulative(), two.cumulative(), strict=True)]
    assert together == filled((1, 2), [0.5, 3, 1.5, 1.5, 9]).cumulative() == [1, 3, 5]


def test_without_observations_there_is_no_quantile():
    assert quantile(0.5, (1, 2), [0, 0, 0]) is None, "no observations, so None is the answer"


def test_the_ranks_place_in_its_bucket_is_its_place_between_the_bounds():
    # Rank 6 of 8. Four are below 10, four lie between 10 and 20: it is the second of these four.
    found = quantile(0.75, (10, 20), [4, 8, 8])
    assert found != 20, "the answer lies inside the bucket: go on to the rank's place between its bounds"
    assert found == 15, (
        "rank 6 is half-way from the 4 below the bucket to the 8 at its end: half-way from 10 to 20"
    )


def test_the_first_bucket_begins_at_zero():
    assert quantile(0.125, (10, 20), [4, 8, 8]) == 2.5, (
        "the first bucket reaches from 0 to its bound, and rank 1 of its 4 is a quarter of it"
    )


def test_of_the_last_bucket_only_its_lower_bound_is_known():
    assert quantile(0.99, (10, 20), [4, 8, 16]) == 20, (
        "an observation above every bound could be anywhere: the answer is the largest bound"
    )
    assert quantile(1, (10, 20), [0, 0, 3]) == 20


def test_the_bucket_is_the_first_whose_count_reaches_the_rank():
    # Rank 4 of 8 is the last of the first bucket; the second bucket is empty.
    found = quantile(0.5, (10, 20, 30), [4, 4, 8, 8])
    assert found == 10, "the first bucket whose cumulative count reaches the rank holds it, a full one too"


def test_the_articles_example():
    waits = [0.03, 0.05, 0.05, 0.07, 0.09, 0.2, 0.2, 0.22, 0.3, 0.4]
    histogram = filled((0.06, 0.1, 0.25, 0.5), waits)
    assert histogram.cumulative() == [3, 5, 8, 10, 10]
    assert quantile(0.95, histogram.bounds, histogram.cumulative()) == pytest.approx(0.4375), (
        "rank 0.95 · 10 = 9.5 stays 9.5, and is not rounded: three quarters of the way from 8 to 10"
    )
    assert quantile(0.5, histogram.bounds, histogram.cumulative()) == pytest.approx(0.1), (
        "rank 5 is the end of the bucket up to 100 ms"
    )


@pytest.mark.parametrize("q", [0, -0.1, 1.01, 50, float("nan")])
def test_a_share_that_is_none_is_refused_by_name(q):
    error = outcome(quantile, q, (1,), [1, 1])
    want = f"ValueError: q={q}: accepted are shares above 0, up to 1"
    assert error == want, f"a q that is no share is refused in these words: {want!r}, not {error!r}"


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_lies_in_the_bucket_of_the_true_quantile(seed):
    rng = random.Random(seed)
    bounds = sorted(rng.sample(range(1, 60), 6))
    values = sorted(rng.uniform(0, 70) for _ in range(rng.randint(1, 200)))
    histogram = filled(bounds, values)
    for percent in range(1, 101):
        true = values[-(-percent * len(values) // 100) - 1]
        estimate = quantile(percent / 100, bounds, histogram.cumulative())
        bucket = bisect_left(bounds, true)
        if bucket == len(bounds):
            assert estimate == bounds[-1]
        else:
            lower = bounds[bucket - 1] if bucket else 0
            assert lower - 1e-9 <= estimate <= bounds[bucket] + 1e-9, (
                f"p{percent} of {len(values)} values: between the bounds of the bucket that holds the rank, "
                f"{lower} and {bounds[bucket]}, whether the one before is empty or not"
            )


def test_a_share_is_looked_at_before_the_counts():
    error = outcome(quantile, 1.5, (1,), [0, 0])
    assert str(error).startswith("ValueError"), f"1.5 is no share, observed or not: {error}"
