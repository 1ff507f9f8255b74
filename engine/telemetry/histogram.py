"""Histograms: counts of observations by size, and estimates of quantiles from the counts. Part 11.

A histogram keeps one count per bucket. Its memory does not grow with the number of observations, and the
histograms of several servers can be added. Where in its bucket an observation lay is lost, so a quantile from
a histogram is an estimate. Knows nothing of engines. Source: https://prometheus.io/docs/practices/histograms/
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts observations by bucket, and adds them up. Not thread-safe.

    `bounds` are the upper bounds of the buckets, rising. A last bucket without an upper bound is added.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # one per bucket; the last: above every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation. A value equal to a bound belongs to the bucket that ends at this bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """[bounds + 1]: how many observations are at most each bound, and, last, how many there are."""
        return list(accumulate(self.counts))

    def prometheus_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of observations up to it) of each bucket, as Prometheus' client takes them."""
        upper_bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(upper_bounds, self.cumulative(), strict=True))


def quantile(q: float, bounds: Sequence[float], cumulative: Sequence[int]) -> float | None:
    """The value that a share `q` of the observations does not exceed, estimated from a histogram.

    `bounds` are the upper bounds of the buckets, rising. `cumulative` has one entry more than `bounds`:
    `cumulative[i]` observations are at most `bounds[i]`, and the last entry is the number of observations, N.
    Returns None if there are no observations. The estimate is that of Prometheus' `histogram_quantile`:

    1. The rank is q·N. The rank falls into the first bucket whose cumulative count is at least the rank.
    2. The observations of a bucket are assumed to lie evenly between the bucket's lower bound (0 for the
       first bucket) and upper bound. The result is the value at the rank's place between the two bounds.
    3. The last bucket has no upper bound. If the rank falls into the last bucket, the result is the
       bucket's lower bound.

    Raises ValueError unless 0 < q <= 1, with the message "q=Q: accepted are shares above 0, up to 1", where Q
    is the value of `q`.
    """
    if not 0 < q <= 1:
        raise ValueError(f"q={q}: accepted are shares above 0, up to 1")
    if not cumulative[-1]:
        return None
    rank = q * cumulative[-1]
    bucket = bisect_left(cumulative, rank)  # the first whose count is at least the rank
    if bucket >= len(bounds):
        return bounds[-1]
    lower = bounds[bucket - 1] if bucket else 0.0
    below = cumulative[bucket - 1] if bucket else 0
    return lower + (bounds[bucket] - lower) * (rank - below) / (cumulative[bucket] - below)
