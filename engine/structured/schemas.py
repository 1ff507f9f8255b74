"""The schemas within a JSON schema: which keywords hold them, and two walks through them. Extension B."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords, by what their values are.
DATA = ("const", "enum", "default", "examples")  # no schemas
DEFINITIONS = ("$defs", "definitions")  # schemas by name, to which others refer
BY_NAME = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)  # schemas by name
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")  # lists of schemas
SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def schemas_within(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each schema directly within a schema, as (its steps in a JSON pointer, the schema)."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            for name, part in value.items():
                yield f"{keyword}/{escaped(name)}", part
        elif keyword in LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield f"{keyword}/{i}", part
        elif keyword in SINGLE:
            yield keyword, value


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema in which `change` was applied to each mapping within that may be a schema, and last
    to the schema itself.

    A `$ref` may lead into any keyword, known or not. So any mapping may be a schema, except for a mapping
    from names to schemas (BY_NAME), and for the values of the keywords in DATA, which stay as they are.
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


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
