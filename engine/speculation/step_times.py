"""A table of how long steps take, by their numbers of sequences and of drafts. Part 16.

The table does not change: engine/speculation/measuring.py measures it once, before the first request. With a
given table, every run decides alike. This module knows no engine.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

REQUIRED = ("sequences", "drafts", "step_seconds")
OPTIONAL = ("read_seconds", "single_draft_seconds")
ACCEPTED = "sequences, drafts, step_seconds, read_seconds and single_draft_seconds are accepted"


@dataclass(frozen=True)
class StepTimes:
    """The seconds of steps, for N numbers of sequences and M numbers of drafts of each sequence.

    Between these numbers, times are interpolated linearly; beyond them, the nearest segment is continued.
    Raises ValueError, which names the field, if the numbers do not form such a table.
    """

    sequences: tuple[int, ...]  # [N]: ascending, the first is 1
    drafts: tuple[int, ...]  # [M]: ascending, the first is 0
    step_seconds: tuple[tuple[float, ...], ...]  # [N, M]
    read_seconds: float = 0.0  # for each token of a text that the proposer has not read yet
    # [N]: the time of a step in which one sequence has one draft and the others have none. Such a step may
    # not replay the plain steps' CUDA graph, and then takes longer than interpolation says. None
    # interpolates.
    single_draft_seconds: tuple[float, ...] | None = None

    @classmethod
    def from_dict(cls, table: object) -> "StepTimes":
        """The table from a dict like that of `as_dict`. Raises ValueError, which names the field."""
        if not isinstance(table, Mapping) or not set(REQUIRED) <= set(table):
            raise ValueError(f"step_times={table!r}: a mapping with {ACCEPTED}")
        unknown = set(table) - {*REQUIRED, *OPTIONAL}
        if unknown:
            raise ValueError(f"step_times: {min(unknown, key=str)!r} is unknown; {ACCEPTED}")
        for name in REQUIRED:
            if not isinstance(table[name], Sequence) or isinstance(table[name], str):
                raise ValueError(f"step_times: {name}={table[name]!r}: a list is accepted")
        # A row that is no list becomes a row of one. `__post_init__` checks the lengths and the entries.
        rows = [tuple(row) if isinstance(row, Sequence) else (row,) for row in table["step_seconds"]]
        single = table.get("single_draft_seconds")
        return cls(
            sequences=tuple(table["sequences"]),
            drafts=tuple(table["drafts"]),
            step_seconds=tuple(rows),
            read_seconds=table.get("read_seconds", 0.0),
            single_draft_seconds=tuple(single) if isinstance(single, Sequence) else single,
        )

    def __post_init__(self) -> None:
        _check_ascending("sequences", self.sequences, first=1)
        _check_ascending("drafts", self.drafts, first=0)
        N, M = len(self.sequences), len(self.drafts)
        has_shape = [len(row) for row in self.step_seconds] == [M] * N
        are_times = all(_is_time(seconds) for row in self.step_seconds for seconds in row)
        if not has_shape or not are_times:
            raise ValueError(
                f"step_times: step_seconds={self.step_seconds}: {N} rows of {M} positive numbers of seconds "
                "are accepted"
            )
        single = self.single_draft_seconds
        if single is not None:
            has_length = isinstance(single, tuple) and len(single) == N
            if not has_length or not all(map(_is_time, single)):
                message = f"{N} positive numbers of seconds are accepted"
                raise ValueError(f"step_times: single_draft_seconds={single!r}: {message}")
        if self.read_seconds != 0 and not _is_time(self.read_seconds):
            raise ValueError(f"step_times: read_seconds={self.read_seconds!r}: seconds are accepted")

    def as_dict(self) -> dict[str, Any]:
        """The fields as a dict of numbers and tuples, for JSON and for `from_dict`."""
        return asdict(self)

    def seconds(self, sequences: int, drafts: float) -> float:
        """The seconds of a step of `sequences` sequences with `drafts` drafts each on average."""
        by_sequences = [_interpolated(self.drafts, row, drafts) for row in self.step_seconds]  # [N]
        seconds = _interpolated(self.sequences, by_sequences, sequences)
        # A falling last segment, continued far enough, would end below the time of the smallest step.
        seconds = max(seconds, self.step_seconds[0][0])
        if self.single_draft_seconds is not None and drafts > 0:
            return max(seconds, _interpolated(self.sequences, self.single_draft_seconds, sequences))
        return seconds

    def seconds_to_read(self, tokens: int) -> float:
        """The seconds that a proposer takes to read `tokens` unread tokens."""
        return tokens * self.read_seconds


def _check_ascending(name: str, numbers: tuple[int, ...], first: int) -> None:
    """Raises ValueError unless `numbers` are ints in ascending order, the first of which is `first`."""
    are_ints = all(type(number) is int for number in numbers)
    ascending = are_ints and all(a < b for a, b in pairwise(numbers))
    if not numbers or not ascending or numbers[0] != first:
        raise ValueError(f"step_times: {name}={numbers}: whole numbers from {first} upwards are accepted")


def _is_time(number: object) -> bool:
    """Whether `number` is a positive, finite number, and no bool."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


def _interpolated(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """The y at x: linear between the two points around x. Outside of all points, the nearest segment is
    continued.
    """
    if len(xs) == 1:
        return ys[0]
    i = bisect_right(xs[1:-1], x)  # the segment from point i to point i + 1
    share = (x - xs[i]) / (xs[i + 1] - xs[i])
    return ys[i] + share * (ys[i + 1] - ys[i])
