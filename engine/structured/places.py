"""Where in a JSON schema something is refused: the keyword, and the way to it. Extension B.

The library that refuses says why, and not where. The place is found by asking it about parts: a schema within
the schema that is refused for the same reason, and in the smallest of these the keyword without which it is
not.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
MAX_CHARACTERS = 1 << 18  # of all parts that are compiled, as JSON: a second at most
REFERENCED = ("$defs", "definitions")  # schemas that others refer to
BY_NAME = ("properties", "patternProperties", "dependentSchemas", *REFERENCED)  # schemas by name
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
Why = Callable[[Any], str | None]  # a schema -> why it is refused, or None


def place(schema: Any, why: Why) -> str:
    """The place of what is refused, as a JSON pointer, such as "#/properties/age/not". If that takes too
    long to find, a place above it.
    """
    reason, num_left = why(schema), MAX_CHARACTERS
    referenced = {}
    if isinstance(schema, Mapping):
        referenced = {name: schema[name] for name in REFERENCED if name in schema}

    def is_refused(part: Any) -> bool:
        """Whether a part is refused for the same reason."""
        nonlocal num_left
        alone = {**referenced, **part} if isinstance(part, Mapping) else part
        num_left -= len(json.dumps(alone))
        return num_left > 0 and why(alone) == reason

    # 1. Go down, as long as a schema within is refused by itself.
    way, here = "#", schema
    while inner := next(((step, part) for step, part in _within(here) if is_refused(part)), None):
        way, here = f"{way}/{inner[0]}", inner[1]
    # 2. There, find the keyword without which nothing is refused.
    names = here if isinstance(here, Mapping) else ()
    for name in sorted(names, key=lambda name: name not in (reason or "")):  # those that it names first
        is_cause = not is_refused({other: value for other, value in here.items() if other != name})
        if is_cause and num_left > 0:
            return f"{way}/{_escaped(name)}"
    return way


def _within(schema: Any) -> Iterator[tuple[str, Any]]:
    """(step, schema) for each schema within a schema: the steps of a pointer, and what lies there."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            yield from ((f"{keyword}/{_escaped(name)}", part) for name, part in value.items())
        elif keyword in LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{i}", part) for i, part in enumerate(value))
        elif keyword in SINGLE:
            yield keyword, value


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema, with what `change` makes of it and of each schema within. Data stays as it is."""
    if isinstance(schema, list):
        return [changed(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {}
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            copy[keyword] = {name: changed(part, change) for name, part in value.items()}
        else:
            copy[keyword] = value if keyword in DATA else changed(value, change)
    return change(copy)


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
