"""Refuses JSON schemas that would take too long to compile, or that llguidance would misread. Extension B.

llguidance bounds most of its work by itself. It does not bound its time for

- an object with many properties: the time grows with the square of their number;
- several patterns that one text must fit: each pattern triples the time;
- `multipleOf`: the time grows with the least common multiple of all values in the schema, and with their sum.

It also keeps the bounds of numbers in 64 bits, and reads a bound beyond them as another number without an
error.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from engine.structured.places import BY_NAME, DATA, DEFINITIONS, map_schemas

MAX_PROPERTIES = 1000  # of one object
MAX_PATTERNS = 5  # that one text must fit
MAX_MULTIPLE = 10_000  # least common multiple, and sum, of all `multipleOf`, as `_without_zeros` counts them
MAX_BOUND = 1 << 63  # the largest magnitude of a number's bound
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def why_refused(schema: Any) -> str | None:
    """Why a schema is refused: the keyword, its value and what is accepted. None if it is not refused."""
    common_multiple, sum_of_multiples = 1, 0
    for part in _all_schemas(schema):
        if reason := _why_part_refused(part):
            return reason
        value = part.get("multipleOf")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            continue
        digits = _without_zeros(value)
        common_multiple, sum_of_multiples = math.lcm(common_multiple, digits), sum_of_multiples + digits
        if max(common_multiple, sum_of_multiples) > MAX_MULTIPLE:
            return (
                f"multipleOf={value}: at most {MAX_MULTIPLE} is accepted, as the least common multiple "
                "and the sum of all in the schema, without a decimal point and zeros at the end"
            )
    num_patterns = _PatternCounter(schema).count(schema)
    if num_patterns > MAX_PATTERNS:
        return f"one text must fit {num_patterns} patterns; at most {MAX_PATTERNS} are accepted"
    return None


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


def _all_schemas(schema: Any) -> list[dict[str, Any]]:
    """The schema and all schemas within it, the inner ones first."""
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


class _PatternCounter:
    """Counts how many patterns and formats one text of a schema must fit at once, at most.

    The keywords `if`, `then`, `else` and `not` need no care: llguidance refuses them.
    """

    def __init__(self, root: Any) -> None:
        """`root`: the whole schema, in which references are looked up."""
        self.root = root
        self.counts: dict[str, int] = {}  # by reference; 0 while the count is under way

    def count(self, schema: Any) -> int:
        """The count for a schema, or for another value within a schema."""
        if not isinstance(schema, Mapping):
            return 0
        own = sum(isinstance(schema.get(keyword), str) for keyword in ("pattern", "format"))
        inner = 0  # of a property or an item: other texts than the schema's own
        together = 0  # of the schemas that the same text, property or item must fit, too
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                together += self._count_reference(value)
            elif keyword == "allOf":
                together += sum(map(self.count, _parts(keyword, value)))
            elif keyword in ("anyOf", "oneOf"):
                together += max(map(self.count, _parts(keyword, value)), default=0)
            elif keyword not in (*DATA, *DEFINITIONS):  # a definition counts where a reference leads to it
                inner = max([inner, *map(self.count, _parts(keyword, value))])
        return max(own, inner) + together

    def _count_reference(self, reference: str) -> int:
        if reference not in self.counts:
            self.counts[reference] = 0  # a reference back to here adds nothing
            self.counts[reference] = self.count(self._resolve(reference))
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


def _parts(keyword: str, value: Any) -> list[Any]:
    """The schemas that are the value of a keyword, or other values."""
    if keyword in BY_NAME and isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else [value]
