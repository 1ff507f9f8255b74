"""Makes JSON schemas of calls from the schemas of tools. Extension B.

Promises that the arguments of a text that fits the schema of calls fit their tool's schema, even if the
tool's schema has references to itself. Does not check whether a schema can be met: the compiler does.
"""

from collections.abc import Sequence
from typing import Any

from engine.server.chat_tools import Tool
from engine.structured.schemas import map_schemas

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def schema_of_call(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Without parameters, it accepts {} alone."""
    parameters = tool.function.parameters
    return {"type": "object", **parameters} if parameters else NO_ARGUMENTS


def schema_of_calls(tools: Sequence[Tool], arguments_field: str, max_calls: int) -> dict[str, Any]:
    """The schema of a list of 1 to `max_calls` calls, each {"name": …, `arguments_field`: {…}}."""
    definitions, calls = {}, []
    for i, tool in enumerate(tools):
        place = f"#/$defs/tool{i}"
        definitions[f"tool{i}"] = _moved(schema_of_call(tool), place)
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, arguments_field: {"$ref": place}},
            "required": ["name", arguments_field],
            "additionalProperties": False,
        }
        calls.append(call)
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "minItems": 1, "maxItems": max_calls, "items": items, "$defs": definitions}


def _moved(schema: dict[str, Any], place: str) -> Any:
    """The schema for use at `place` in a larger schema: references to the schema's own parts, such as
    #/$defs/x, become references below `place`.
    """

    def move(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return part | {"$ref": f"{place}{reference[1:]}"}
        return part

    # With an `$id`, references below it would be read within this schema, not in the larger one.
    without_ids = {name: value for name, value in schema.items() if name not in ("$id", "$schema")}
    return map_schemas(without_ids, move)
