"""Where in a JSON schema something is refused: the keyword, and the way to it. Extension B.

A library that refuses a schema says why, but not where. So parts of the schema are tried, one by one. First
the smallest schema within the schema is searched that is refused for the same reason. Then, in this smallest
schema, the keyword without which it is not refused.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_SECONDS = 0.5  # of the thread's processor time: a part may take as long as the schema itself
# Keywords, by what their values are.
DATA = ("const", "enum", "default", "examples")  # no schemas
DEFINITIONS = ("$defs", "definitions")  # schemas by name, to which others refer
BY_NAME = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)  # schemas by name
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")  # lists of schemas
SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
WhyRefused = Callable[[Any], str | None]  # a schema -> why it is refused, or None


def place_of_refusal(schema: Any, why_refused: WhyRefused) -> str:
    """The place of what is refused in `schema`, as a JSON pointer, such as "#/properties/age/not". If the
    search takes more than MAX_SECONDS, the result is a place above it.
    """
    reason, deadline = why_refused(schema), time.thread_time() + MAX_SECONDS
    definitions = {}
    if isinstance(schema, Mapping):
        definitions = {keyword: schema[keyword] for keyword in DEFINITIONS if keyword in schema}

    def is_refused(part: Any) -> bool:
        """Whether a part is refused for the same reason. False if no time is left."""
        with_definitions = {**definitions, **part} if isinstance(part, Mapping) else part
        return time.thread_time() < deadline and why_refused(with_definitions) == reason

    def refused_within(outer: Any) -> tuple[str, Any] | None:
        """The first schema directly within `outer` that is refused, as (its steps in a JSON pointer, the
        schema); None if none is.
        """
        for steps, part in _schemas_within(outer):
            if is_refused(part):
                return steps, part
        return None

    # 1. Go down to the smallest schema that is refused.
    pointer, smallest = "#", schema
    inner = refused_within(schema)
    while inner is not None:
        steps, smallest = inner
        pointer += f"/{steps}"
        inner = refused_within(smallest)
    # 2. There, find the keyword without which the schema is not refused. The reason may name the keyword, so
    #    keywords in it are tried first.
    keywords = list(smallest) if isinstance(smallest, Mapping) else []
    for keyword in sorted(keywords, key=lambda keyword: keyword not in (reason or "")):
        without_keyword = {name: value for name, value in smallest.items() if name != keyword}
        if not is_refused(without_keyword) and time.thread_time() < deadline:
            return f"{pointer}/{_escaped(keyword)}"
    return pointer


def _schemas_within(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each schema directly within a schema, as (its steps in a JSON pointer, the schema)."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            for name, part in value.items():
                yield f"{keyword}/{_escaped(name)}", part
        elif keyword in LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield f"{keyword}/{i}", part
        elif keyword in SINGLE:
            yield keyword, value


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema in which `change` was applied to each schema within, and last to the schema itself.
    Values of the keywords in DATA stay as they are.
    """
    if isinstance(schema, list):
        return [map_schemas(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            copy[keyword] = {name: map_schemas(part, change) for name, part in value.items()}
        elif keyword in DATA:
            copy[keyword] = value
        else:
            copy[keyword] = map_schemas(value, change)
    return change(copy)


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
