"""Refuses JSON schemas that would take too long to compile, or that llguidance would misread. Extension B.

llguidance bounds most of its work by itself. It does not bound its time for

- an object with many properties: the time grows with the square of their number;
- several patterns that one text must fit: each pattern triples the time;
- `multipleOf`: the time grows with the least common multiple of all values in the schema, and with their sum.

It also keeps the bounds of numbers in 64 bits, and reads a bound beyond them as another number without an
error.
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from engine.structured.schemas import BY_NAME, DATA, DEFINITIONS, map_schemas

MAX_PROPERTIES = 1000  # of one object
MAX_PATTERNS = 5  # that one text must fit
MAX_STEPS = 300_000  # to count the patterns
MAX_MULTIPLE = 10_000  # least common multiple, and sum, of all `multipleOf`, as `_without_zeros` counts them
MAX_BOUND = 1 << 63  # the largest magnitude of a number's bound
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def why_refused(schema: Any) -> str | None:
    """Why a schema is refused: the keyword, its value and what is accepted. None if it is not refused."""
    parts = _all_schemas(schema)
    for part in parts:
        reason = _why_part_refused(part)
        if reason is not None:
            return reason
    reason = _why_multiples_refused(parts)
    if reason is not None:
        return reason
    return _why_patterns_refused(schema)


def _why_part_refused(part: dict[str, Any]) -> str | None:
    """As `why_refused`, for the keywords of one schema that count by themselves."""
    if "x-guidance" in part:  # with it, a schema can have llguidance skip keywords that it does not know
        return "x-guidance is llguidance's own, and is not accepted"
    for keyword in ("properties", "required"):
        value = part.get(keyword)
        if isinstance(value, dict | list) and len(value) > MAX_PROPERTIES:
            return f"{keyword} has {len(value)} names; at most {MAX_PROPERTIES} are accepted"
    for keyword in BOUNDS:
        value = part.get(keyword)
        if isinstance(value, int | float) and not _is_exact(value):
            return f"{keyword}={value}: a number that has an exact float of 64 bits is accepted, up to 2**63"
    return None


def _why_multiples_refused(parts: list[dict[str, Any]]) -> str | None:
    """As `why_refused`, for the `multipleOf` of all schemas together."""
    common_multiple, total = 1, 0
    for part in parts:
        value = part.get("multipleOf")
        if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
            continue
        digits = _without_zeros(value)
        common_multiple = math.lcm(common_multiple, digits)
        total += digits
        if max(common_multiple, total) > MAX_MULTIPLE:
            return (
                f"multipleOf={value}: at most {MAX_MULTIPLE} is accepted, as the least common multiple "
                "and the sum of all in the schema, without a decimal point and zeros at the end"
            )
    return None


def _why_patterns_refused(schema: Any) -> str | None:
    """As `why_refused`, for the patterns and formats that one text must fit at once."""
    try:
        num_patterns = _PatternCounter(schema).count()
    except _TooManySteps:
        return "$ref and allOf join too many schemas to count the patterns that one text must fit"
    if num_patterns > MAX_PATTERNS:
        return f"one text must fit {num_patterns} patterns; at most {MAX_PATTERNS} are accepted"
    return None


def _all_schemas(schema: Any) -> list[dict[str, Any]]:
    """The schema and all mappings within it that may be schemas (`map_schemas`), the inner ones first."""
    schemas: list[dict[str, Any]] = []

    def collect(part: dict[str, Any]) -> dict[str, Any]:
        schemas.append(part)
        return part

    map_schemas(schema, collect)
    return schemas


def _is_exact(value: int | float) -> bool:
    """Whether llguidance reads a bound as it is written, as a float of 64 bits."""
    if abs(value) > MAX_BOUND:
        return False
    # MAX_BOUND - 1, the largest int64, has no exact float, but llguidance reads it as what is meant.
    return value == MAX_BOUND - 1 or int(float(value)) == int(value)


def _without_zeros(value: int | float) -> int:
    """The digits of a number as a whole number, without zeros at the end: 25 for 0.25, 25 and 2500."""
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


class _Counts(NamedTuple):
    """How many patterns and formats the texts of a schema must fit at once, at most."""

    whole: int  # the text of the schema itself
    # A text within it, by the name of its property or the number of its item; None: of all others.
    within: dict[str | int | None, int]

    def of(self, name: str | int | None) -> int:
        """The count of one text within."""
        return self.within.get(name, self.within[None])

    def largest(self) -> int:
        """The count of the text that must fit most."""
        return max(self.whole, *self.within.values())


NO_PATTERN = _Counts(0, {None: 0})


class _TooManySteps(Exception):
    """To count takes more than MAX_STEPS."""


class _PatternCounter:
    """Counts how many patterns and formats one text of a schema must fit at once, at most.

    A reference that leads back to itself has the counts that it had in the pass before, from 0 on. Passes
    follow until nothing changes. The keywords `if`, `then`, `else` and `not` need no care: llguidance refuses
    them.
    """

    def __init__(self, root: Any) -> None:
        """`root`: the whole schema, in which references are looked up."""
        self.root = root
        self.before: dict[str, _Counts] = {}  # by reference, of the pass before
        # By reference, of this pass; while a count is under way, that of the pass before.
        self.counts: dict[str, _Counts] = {}
        self.steps_left = MAX_STEPS

    def count(self) -> int:
        """The count of the text of `root` that must fit most. Raises _TooManySteps."""
        while True:
            self.counts = {}
            largest = self._count(self.root).largest()
            if largest > MAX_PATTERNS or self.counts == self.before:
                return largest
            self.before = self.counts

    def _count(self, schema: Any) -> _Counts:
        """The counts of a schema, or of another value within a schema."""
        if not isinstance(schema, Mapping):
            return NO_PATTERN
        whole = len([keyword for keyword in ("pattern", "format") if isinstance(schema.get(keyword), str)])
        within: dict[str | int | None, int] = {None: 0}
        others: list[_Counts] = []  # of the other schemas that the same text must fit, too
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                others.append(self._count_reference(value))
            elif keyword == "allOf":
                others += [self._count(part) for _, part in _parts(keyword, value)]
            elif keyword in ("anyOf", "oneOf"):  # the text must fit one of these
                alternatives = [self._count(part) for _, part in _parts(keyword, value)]
                others.append(self._merge(max, alternatives))
            elif keyword not in (*DATA, *DEFINITIONS):  # a definition counts where a reference leads to it
                for name, part in _parts(keyword, value):
                    within[name] = max(within.get(name, 0), self._count(part).largest())
        return self._merge(sum, [_Counts(whole, within), *others])

    def _merge(self, merge: Callable[[list[int]], int], all_counts: list[_Counts]) -> _Counts:
        """One record of several: `merge` is `sum` for schemas of one text, and `max` for alternatives. Raises
        _TooManySteps.
        """
        names = {name for counts in all_counts for name in counts.within}
        self.steps_left -= 1 + len(names) * len(all_counts)
        if self.steps_left < 0:
            raise _TooManySteps
        if not all_counts:
            return NO_PATTERN
        within = {name: merge([counts.of(name) for counts in all_counts]) for name in names}
        return _Counts(merge([counts.whole for counts in all_counts]), within)

    def _count_reference(self, reference: str) -> _Counts:
        """The counts of the schema to which a reference leads, computed once in each pass."""
        if reference not in self.counts:
            self.counts[reference] = self.before.get(reference, NO_PATTERN)
            self.counts[reference] = self._count(self._resolve(reference))
        return self.counts[reference]

    def _resolve(self, reference: str) -> Any:
        """The value in the schema to which a reference such as "#/$defs/a" leads; None if there is none."""
        if not reference.startswith("#"):
            return None
        value = self.root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")  # as JSON pointers (RFC 6901) write these
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def _parts(keyword: str, value: Any) -> list[tuple[str | int | None, Any]]:
    """The schemas that are the value of a keyword, or other values, each with the property or the item that
    it is for; None: for any.
    """
    if keyword == "properties" and isinstance(value, Mapping):
        return list(value.items())
    if keyword == "prefixItems" and isinstance(value, list):
        return list(enumerate(value))
    if keyword in BY_NAME and isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        parts = [value]
    return [(None, part) for part in parts]
