"""The last minutes, second by second, in a bounded amount of memory: what the dashboards draw. Part 11.

Keeps where the counters stood at the end of each second; a reader takes the difference. A second in
which nothing happened is not kept: everything stands as it stood. Times to first token and times per output
token are kept one by one, the newest of them, so percentiles are those of real observations, not estimates
from buckets. Not locked; knows nothing of requests.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DATA = "/dashboard/data"  # where a server shows them
SECONDS = 180  # that are shown
WINDOW = 30  # seconds that a percentile looks back
MOST = 4096  # observations of a kind that are kept; at over 136 a second the window is shorter
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
KINDS = ("ttft", "tpot")


class Point(NamedTuple):
    """Where things stand: four counters, then three gauges."""

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
    points: list[tuple[int, Point]]  # second since the start -> as it ended, in order
    samples: dict[str, list[tuple[float, float]]]  # kind -> (when, observed), in order
    percentile_cache: dict[tuple[str, int], list[float] | None]  # of seconds that are over; shared

    def read(self, now: float) -> dict:
        """By second, oldest first, as columns: `second` since the start, the fields of Point as they stood
        when it ended, and of each kind p50, p95 and p99 over the `window` seconds before, None without an
        observation. Only seconds that are over; before the first stands one more, from which the counters
        grow.
        """
        last = math.floor(now - self.start) - 1
        seconds = range(max(-1, last - SECONDS), last + 1)
        columns: dict = {"second": list(seconds)}
        ends = [second for second, _ in self.points]
        by_second = [self.points[bisect_right(ends, second) - 1][1] for second in seconds]
        for i, name in enumerate(Point._fields):
            columns[name] = [round(point[i], 4) for point in by_second]
        for kind in KINDS:
            rows = [self._percentiles(kind, second) for second in seconds]
            columns[kind] = {name: [row and row[i] for row in rows] for i, name in enumerate(PERCENTILES)}
        for key in [key for key in list(self.percentile_cache) if key[1] < seconds[0]]:
            self.percentile_cache.pop(key, None)
        return columns

    def _percentiles(self, kind: str, second: int) -> list[float] | None:
        if (kind, second) not in self.percentile_cache:
            samples, end = self.samples[kind], self.start + second + 1
            first, last = (bisect_left(samples, (t,)) for t in (end - self.window, end))
            values = sorted(value for _, value in samples[first:last])
            shares = PERCENTILES.values()
            self.percentile_cache[kind, second] = (
                [round(percentile(values, q), 6) for q in shares] if values else None
            )
        return self.percentile_cache[kind, second]


class History:
    """Written by the engine's thread; `copy` is for readers."""

    def __init__(self, start: float) -> None:
        """`start`: when second 0 begins, on the clock of all times that follow."""
        self.start = start
        nothing = Point(0, 0, 0, 0, 0, 0, 0.0)
        # Seconds are distinct, so these reach back beyond the first that is shown.
        self._points: deque[tuple[int, Point]] = deque([(-1, nothing)], maxlen=SECONDS + 4)
        self._samples: dict[str, deque[tuple[float, float]]] = {kind: deque(maxlen=MOST) for kind in KINDS}
        self._percentile_cache: dict[tuple[str, int], list[float] | None] = {}

    def note(self, now: float, point: Point) -> None:
        """Where things stand; the last of a second is kept."""
        second = math.floor(now - self.start)
        if self._points[-1][0] >= second:
            self._points[-1] = (self._points[-1][0], point)
        else:
            self._points.append((second, point))

    def sample(self, kind: str, when: float, value: float) -> None:
        """One observation of `kind`, not older than the last."""
        self._samples[kind].append((when, value))

    def copy(self) -> HistorySnapshot:
        samples = {kind: list(kept) for kind, kept in self._samples.items()}
        return HistorySnapshot(self.start, WINDOW, list(self._points), samples, self._percentile_cache)


def percentile(values: Sequence[float], q: float) -> float:
    """Of sorted values, the smallest that a share `q` of them does not exceed: one of them, none between
    two.
    """
    return values[math.ceil(q * len(values)) - 1]
