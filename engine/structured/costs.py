"""Refuses JSON schemas that would take too long to compile, or that a library reads otherwise than they say.
Extension B.

llguidance bounds most of its work by itself. Not bounded are: its time for an object with many properties,
which grows with their square; for several patterns that one text must fit, which triples with each; and for
multiples, which grows with their least common multiple and their number. Its bounds of numbers are 64 bits
wide, and a bound beyond them becomes another one in silence.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from engine.structured.places import changed

MAX_PROPERTIES = 1000  # of one object
MAX_PATTERNS = 5  # that one text must fit
MAX_MULTIPLE = 10_000  # least common multiple, and sum, of all `multipleOf`, without zeros at their ends
LIMIT = 1 << 63  # of a number's bounds, on both sides
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def why_costly(schema: Any) -> str | None:
    """Why a schema is refused before a library sees it: the keyword and what is accepted. None: it is not."""
    multiple, total = 1, 0
    for part in _schemas(schema):
        if "x-guidance" in part:  # it may say that keywords which are not known are passed over
            return "x-guidance is llguidance's own, and is not accepted"
        for name in ("properties", "required"):
            count = len(value) if isinstance(value := part.get(name), dict | list) else 0
            if count > MAX_PROPERTIES:
                return f"{name} has {count} names; at most {MAX_PROPERTIES} are accepted"
        for name in BOUNDS:
            value = part.get(name)
            if isinstance(value, int | float) and not _is_exact(value):
                return f"{name}={value}: a number that has an exact float of 64 bits is accepted, up to 2**63"
        if isinstance(value := part.get("multipleOf"), int | float) and value:
            digits = _without_zeros(value)
            multiple, total = math.lcm(multiple, digits), total + digits
            if max(multiple, total) > MAX_MULTIPLE:
                return (
                    f"multipleOf={value}: at most {MAX_MULTIPLE} is accepted, as the least common multiple "
                    "and the sum of all in the schema, without a decimal point and zeros at the end"
                )
    num_patterns = _Patterns(schema).count(schema)
    if num_patterns > MAX_PATTERNS:
        return f"allOf has one text fit {num_patterns} patterns; at most {MAX_PATTERNS} are accepted"
    return None


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """The schema and all schemas within it."""
    found: list[dict[str, Any]] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        found.append(part)
        return part

    changed(schema, note)
    return found


def _is_exact(value: int | float) -> bool:
    """Whether llguidance reads a bound as it is written. 2**63 - 1 has no exact float, and is read as it."""
    if abs(value) > LIMIT:
        return False
    return value == LIMIT - 1 or int(float(value)) == int(value)


def _without_zeros(value: int | float) -> int:
    """The digits of a number as a whole number: 25 for 0.25, 25 and 2500."""
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


class _Patterns:
    """Counts, at most, how many patterns and formats one text of a schema must fit at once."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.known: dict[str, int] = {}  # by reference; 0 while it is being counted

    def count(self, schema: Any) -> int:
        if isinstance(schema, list):
            return max(map(self.count, schema), default=0)
        if not isinstance(schema, Mapping):
            return 0
        here = sum(isinstance(schema.get(name), str) for name in ("pattern", "format"))
        at_once = schema.get("allOf")
        here += sum(map(self.count, at_once)) if isinstance(at_once, list) else 0
        if isinstance(schema.get("$ref"), str):
            here += self._referenced(schema["$ref"])
        others = (value for name, value in schema.items() if name != "allOf")
        return max(here, max(map(self.count, others), default=0))

    def _referenced(self, reference: str) -> int:
        if reference not in self.known:
            self.known[reference] = 0
            self.known[reference] = self.count(self._found(reference))
        return self.known[reference]

    def _found(self, reference: str) -> Any:
        """What a reference within the schema stands for; None for any other."""
        found = self.root if reference.startswith("#") else None
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found
