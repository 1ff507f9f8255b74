"""Numbers counted by size: what a server can keep of a million observations, and what can be read from it.
Part 11.

A histogram keeps a count per bucket, so it costs the same however much it has seen, and histograms of several
servers can be added. What it forgets is where in its bucket a number lay: a quantile from it is an estimate.
Knows nothing of engines. Source: https://prometheus.io/docs/practices/histograms/
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How many observations were at most each of `bounds` (rising), and their sum. Not locked."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last: larger than every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One observation; a value that equals a bound is within it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """[bounds + 1]: how many observations were at most each bound; last, how many there are."""
        return list(accumulate(self.counts))


def quantile(q: float, bounds: Sequence[float], cumulative: Sequence[int]) -> float | None:
    """The value that a share `q` of the observations does not exceed, estimated as Prometheus'
    `histogram_quantile` does. None: there are no observations.

    `cumulative[i]` observations were at most `bounds[i]`; its last entry, one more than there are bounds,
    is their number N. The rank is q·N. It falls into the first bucket whose cumulative count reaches it.
    The bucket's observations are taken to lie evenly between its lower bound (0 for the first bucket) and
    its upper one. Of the last bucket, which has no upper bound, only its lower bound is known: that is the
    answer.

    Raises ValueError unless 0 < q <= 1: "q=2: accepted are shares above 0, up to 1".
    """
    if not 0 < q <= 1:
        raise ValueError(f"q={q}: accepted are shares above 0, up to 1")
    if not cumulative[-1]:
        return None
    rank = q * cumulative[-1]
    bucket = bisect_left(cumulative, rank)  # cumulative counts rise, as bounds do
    if bucket >= len(bounds):
        return bounds[-1]
    lower = bounds[bucket - 1] if bucket else 0.0
    below = cumulative[bucket - 1] if bucket else 0
    return lower + (bounds[bucket] - lower) * (rank - below) / (cumulative[bucket] - below)
