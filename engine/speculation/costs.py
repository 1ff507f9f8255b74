"""What steps cost, with more or fewer sequences and drafts: a table that does not change. Part 16.

Knows no engine: engine/speculation/measuring.py measures it once, before the first request. One that is given
decides alike in every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

ACCEPTED = "sequences, drafts, steps, token_read and one_draft are accepted"


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, by its sequences and the drafts of each; interpolated linearly, also beyond the
    table. Raises ValueError, which names the field: numbers that make no table.
    """

    sequences: tuple[int, ...]  # [N]: ascending, the first is 1
    drafts: tuple[int, ...]  # [M]: ascending, the first is 0
    steps: tuple[tuple[float, ...], ...]  # [N, M]: seconds
    token_read: float = 0.0  # seconds for each token of a text that a proposer has not read along
    # [N]: seconds of a step in which one sequence has one draft and the others have none. Such a step may not
    # replay the plain steps' CUDA graph, and then costs more than interpolation says. None: interpolate.
    one_draft: tuple[float, ...] | None = None

    @classmethod
    def of(cls, given: object) -> "CostTable":
        """As `plain` gives it."""
        if not isinstance(given, Mapping) or not {"sequences", "drafts", "steps"} <= set(given):
            raise ValueError(f"costs={given!r}: a mapping with {ACCEPTED}")
        if unknown := set(given) - {"sequences", "drafts", "steps", "token_read", "one_draft"}:
            raise ValueError(f"costs: {min(unknown, key=str)!r} is unknown; {ACCEPTED}")
        for name in ("sequences", "drafts", "steps"):
            if not isinstance(given[name], Sequence) or isinstance(given[name], str):
                raise ValueError(f"costs: {name}={given[name]!r}: a list is accepted")
        rows = [tuple(row) if isinstance(row, Sequence) else (row,) for row in given["steps"]]
        one_draft = given.get("one_draft")
        return cls(
            tuple(given["sequences"]),
            tuple(given["drafts"]),
            tuple(rows),
            given.get("token_read", 0.0),
            tuple(one_draft) if isinstance(one_draft, Sequence) else one_draft,
        )

    def __post_init__(self) -> None:
        for name, first, sizes in (("sequences", 1, self.sequences), ("drafts", 0, self.drafts)):
            ascending = all(type(size) is int for size in sizes) and all(a < b for a, b in pairwise(sizes))
            if not sizes or not ascending or sizes[0] != first:
                raise ValueError(f"costs: {name}={sizes}: whole numbers from {first} upwards are accepted")
        numbers = [number for row in self.steps for number in row]
        shape = [len(row) for row in self.steps]
        if shape != [len(self.drafts)] * len(self.sequences) or not all(map(_is_time, numbers)):
            raise ValueError(
                f"costs: steps={self.steps}: {len(self.sequences)} rows of {len(self.drafts)} positive "
                "numbers of seconds are accepted"
            )
        one_draft = self.one_draft
        if one_draft is not None and (
            not isinstance(one_draft, tuple)
            or len(one_draft) != len(self.sequences)
            or not all(map(_is_time, one_draft))
        ):
            raise ValueError(f"costs: {one_draft=}: {len(self.sequences)} positive numbers are accepted")
        if self.token_read != 0 and not _is_time(self.token_read):
            raise ValueError(f"costs: token_read={self.token_read!r}: seconds are accepted")

    def plain(self) -> dict[str, Any]:
        """Numbers and lists alone, for JSON."""
        return asdict(self)

    def seconds(self, sequences: int, drafts: float) -> float:
        """What a step of so many sequences takes, each with so many drafts, in the mean."""
        by_sequences = [_interpolated(self.drafts, row, drafts) for row in self.steps]
        seconds = max(_interpolated(self.sequences, by_sequences, sequences), self.steps[0][0])
        if self.one_draft is not None and drafts:
            return max(seconds, _interpolated(self.sequences, self.one_draft, sequences))
        return seconds

    def reading(self, tokens: int) -> float:
        return tokens * self.token_read


def _is_time(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


def _interpolated(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """The value at `size`: linear between the known sizes around it; outside, the nearest segment goes on."""
    if len(sizes) == 1:
        return values[0]
    i = next((i for i, known in enumerate(sizes[1:-1]) if size < known), len(sizes) - 2)
    share = (size - sizes[i]) / (sizes[i + 1] - sizes[i])
    return values[i] + share * (values[i + 1] - values[i])
