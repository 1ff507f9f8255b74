"""The last minutes, second by second, in bounded memory: the data that the dashboards draw. Part 11.

Keeps the values of counters and gauges at the end of each second; a reader computes the differences of the
counters. A second in which nothing happened is not stored: its values are those of the second before. The
newest times to first token and times per output token are also kept one by one, so that percentiles come from
real observations and not from buckets. Not thread-safe; knows nothing of requests.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DATA_PATH = "/dashboard/data"  # the route that sends the history
SECONDS = 180  # the length of the history that is shown
WINDOW = 30  # in seconds: each percentile covers the observations of this window
# Observations kept per kind. With over 19 a second, they cover less than SECONDS and the WINDOW before;
# with over 136 a second, less than WINDOW.
MAX_SAMPLES = 4096
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
KINDS = ("ttft", "tpot")  # kinds of samples: time to first token, time per output token, in seconds
Percentiles = dict[str, float | None]  # a name in PERCENTILES -> seconds; None if there is no sample
NO_PERCENTILES: Percentiles = dict.fromkeys(PERCENTILES)
PercentileCache = dict[tuple[str, int], Percentiles]  # by kind and second


class Point(NamedTuple):
    """The values of four counters and three gauges at one moment. `kv_usage` is a share from 0 to 1."""

    generation_tokens: int
    prompt_tokens: int
    steps: int
    step_sequences: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class HistorySnapshot:
    """A copy of a History, which any thread may read. All times are in seconds of the History's clock."""

    start: float  # when second 0 begins
    window: int  # in seconds: each percentile covers the observations of this window
    points: list[tuple[int, Point]]  # (second since `start`, values at its end), rising
    samples: dict[str, list[tuple[float, float]]]  # kind -> [(time, value in seconds)], rising
    percentile_cache: PercentileCache  # percentiles that no sample can change; all copies share it

    def read(self, now: float) -> dict:
        """The last SECONDS + 1 seconds that are over at time `now`, oldest first, as columns.

        - "second": the number of the second since `start`; -1 stands for the time before.
        - each field of Point: its value at the end of the second.
        - each of KINDS: {"p50": column, "p95": column, "p99": column}, in seconds, over the observations of
          the `window` seconds up to the end of the second; None if none is kept. With more observations
          than MAX_SAMPLES, the oldest seconds lose theirs, except percentiles that an earlier `read` has
          computed.

        The extra second lets a reader compute the differences of counters for SECONDS seconds. Raises
        IndexError if `now` is before `start`.
        """
        last_second = math.floor(now - self.start) - 1  # the last one that is over
        seconds = range(max(-1, last_second - SECONDS), last_second + 1)
        columns: dict = {"second": list(seconds)}
        recorded_seconds = [second for second, _ in self.points]
        points = []  # for each second, the last point that was recorded by its end
        for second in seconds:
            _, point = self.points[bisect_right(recorded_seconds, second) - 1]
            points.append(point)
        for name in Point._fields:
            columns[name] = [round(getattr(point, name), 4) for point in points]
        for kind in KINDS:
            rows = [self._percentiles(kind, second) for second in seconds]
            columns[kind] = {name: [row[name] for row in rows] for name in PERCENTILES}
        self._forget_percentiles_before(seconds[0])
        return columns

    def _percentiles(self, kind: str, second: int) -> Percentiles:
        """The percentiles of a kind's samples in the window that ends with `second`."""
        key = kind, second
        cached = self.percentile_cache.get(key)  # None: not computed yet, or removed by another reader
        if cached is not None:
            return cached
        samples, window_end = self.samples[kind], self.start + second + 1
        # A tuple of a time alone sorts before every (time, value) of the same time.
        first = bisect_left(samples, (window_end - self.window,))
        end = bisect_left(samples, (window_end,))
        values = sorted(value for _, value in samples[first:end])
        percentiles = NO_PERCENTILES
        if values:
            percentiles = {name: round(percentile(values, q), 6) for name, q in PERCENTILES.items()}
        # A step's tokens are sampled a moment after their time, so further samples of this window may come
        # until there is one behind it. Only then can the percentiles be kept.
        if end < len(samples):
            self.percentile_cache[key] = percentiles
        return percentiles

    def _forget_percentiles_before(self, first_second: int) -> None:
        """Remove from `percentile_cache` what is older than the seconds that are shown."""
        for kind, second in list(self.percentile_cache):
            if second < first_second:
                self.percentile_cache.pop((kind, second), None)  # `None`: another reader may have removed it


class History:
    """Records points and samples. The engine's thread writes; a reader in another thread reads a `copy`,
    which must be made while the engine's thread does not write.
    """

    def __init__(self, start: float) -> None:
        """`start`: when second 0 begins, in seconds of the clock that all other times come from."""
        self.start = start
        zero = Point(0, 0, 0, 0, 0, 0, 0.0)
        # There is at most one point per second. A reader needs SECONDS + 1 seconds that are over and the last
        # point before them; with the second that is not over yet, SECONDS + 3 points. One more is a reserve.
        self._points: deque[tuple[int, Point]] = deque([(-1, zero)], maxlen=SECONDS + 4)
        self._samples: dict[str, deque[tuple[float, float]]] = {}
        for kind in KINDS:
            self._samples[kind] = deque(maxlen=MAX_SAMPLES)
        self._percentile_cache: PercentileCache = {}

    def note(self, now: float, point: Point) -> None:
        """Record `point` for the second that `now` is in. A later point of the same second replaces it."""
        second = math.floor(now - self.start)
        last_second, _ = self._points[-1]
        if last_second >= second:
            self._points[-1] = (last_second, point)
        else:
            self._points.append((second, point))

    def sample(self, kind: str, moment: float, value: float) -> None:
        """Record an observation of `kind`, one of KINDS: `value` in seconds, observed at the time `moment`.

        `moment` must not be before the last sample's.
        """
        self._samples[kind].append((moment, value))

    def copy(self) -> HistorySnapshot:
        """A copy of the points and samples that are recorded so far."""
        samples = {kind: list(observations) for kind, observations in self._samples.items()}
        return HistorySnapshot(self.start, WINDOW, list(self._points), samples, self._percentile_cache)


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest of `values` (sorted, not empty) that a share `q` of them (0 < q <= 1) does not exceed."""
    return values[math.ceil(q * len(values)) - 1]
