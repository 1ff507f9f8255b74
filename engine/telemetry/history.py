"""The last minutes, second by second, in a bounded amount of memory: what the dashboards draw. Part 11.

Keeps the values of counters and gauges at the end of each second; a reader takes differences of counters. A
second in which nothing happened is left out: its values are those of the second before. The newest times to
first token and times per output token are kept one by one, so percentiles are those of real observations, not
estimates from buckets. Not locked; knows nothing of requests.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DATA_PATH = "/dashboard/data"  # the route that shows them
SECONDS = 180  # that are shown
WINDOW = 30  # seconds that a percentile looks back
MAX_SAMPLES = 4096  # observations of a kind that are kept; at over 136 a second the window is shorter
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
KINDS = ("ttft", "tpot")  # of samples: time to first token, time per output token
PercentileCache = dict[tuple[str, int], list[float] | None]  # (kind, second) -> PERCENTILES


class Point(NamedTuple):
    """Four counters, then three gauges, at one moment."""

    generation_tokens: int
    prompt_tokens: int
    steps: int
    step_sequences: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class HistorySnapshot:
    """A copy of what a History holds, to be read in any thread."""

    start: float
    window: int
    points: list[tuple[int, Point]]  # (second since the start, values at its end), in order
    samples: dict[str, list[tuple[float, float]]]  # kind -> (when, seconds observed), in order
    percentile_cache: PercentileCache  # of seconds that are over; shared by all copies

    def read(self, now: float) -> dict:
        """The last seconds that are over, oldest first, as columns: `second` since the start; the fields of
        Point at its end; and of each kind p50, p95 and p99 over the `window` seconds up to its end, None
        without an observation. One second more than SECONDS, so that counters have a difference in each.
        """
        last = math.floor(now - self.start) - 1
        seconds = range(max(-1, last - SECONDS), last + 1)
        columns: dict = {"second": list(seconds)}
        recorded_seconds = [second for second, _ in self.points]
        points = []  # one for each second: the last that was recorded by then
        for second in seconds:
            _, point = self.points[bisect_right(recorded_seconds, second) - 1]
            points.append(point)
        for i, name in enumerate(Point._fields):
            columns[name] = [round(point[i], 4) for point in points]
        for kind in KINDS:
            rows = [self._percentiles(kind, second) for second in seconds]
            columns[kind] = {
                name: [None if row is None else row[i] for row in rows] for i, name in enumerate(PERCENTILES)
            }
        for kind, second in list(self.percentile_cache):
            if second < seconds[0]:
                self.percentile_cache.pop((kind, second), None)  # another reader may have been faster
        return columns

    def _percentiles(self, kind: str, second: int) -> list[float] | None:
        """PERCENTILES of a kind's samples in the window that ends with this second; None: there are none."""
        if (kind, second) not in self.percentile_cache:
            samples, window_end = self.samples[kind], self.start + second + 1
            first = bisect_left(samples, (window_end - self.window,))
            end = bisect_left(samples, (window_end,))
            values = sorted(value for _, value in samples[first:end])
            self.percentile_cache[kind, second] = (
                [round(percentile(values, q), 6) for q in PERCENTILES.values()] if values else None
            )
        return self.percentile_cache[kind, second]


class History:
    """Written by the engine's thread; `copy` is for readers."""

    def __init__(self, start: float) -> None:
        """`start`: when second 0 begins, on the clock of all times that follow."""
        self.start = start
        zero = Point(0, 0, 0, 0, 0, 0, 0.0)
        # One point per second at most. A reader needs SECONDS + 1 seconds that are over, the last point
        # before them, and has the second that is not over yet: SECONDS + 3. One is to spare.
        self._points: deque[tuple[int, Point]] = deque([(-1, zero)], maxlen=SECONDS + 4)
        self._samples: dict[str, deque[tuple[float, float]]] = {}
        for kind in KINDS:
            self._samples[kind] = deque(maxlen=MAX_SAMPLES)
        self._percentile_cache: PercentileCache = {}

    def note(self, now: float, point: Point) -> None:
        """Keep `point` as the values of the second that `now` is in; a later one replaces it."""
        second = math.floor(now - self.start)
        if self._points[-1][0] >= second:
            self._points[-1] = (self._points[-1][0], point)
        else:
            self._points.append((second, point))

    def sample(self, kind: str, when: float, value: float) -> None:
        """One observation of `kind`, not older than the last."""
        self._samples[kind].append((when, value))

    def copy(self) -> HistorySnapshot:
        samples = {kind: list(observations) for kind, observations in self._samples.items()}
        return HistorySnapshot(self.start, WINDOW, list(self._points), samples, self._percentile_cache)


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest of sorted values that a share `q` of them does not exceed. Nothing is interpolated."""
    return values[math.ceil(q * len(values)) - 1]
