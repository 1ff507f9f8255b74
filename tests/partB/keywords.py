"""JSON Schema's keywords: a schema for each, what fits it and what does not; and those that are refused.

    python -m tests.partB.keywords                  # the table of the article

The keywords are those of JSON-Schema-Test-Suite's folders for draft 2020-12; the schemas are our own. Most
name a `type`, since a keyword alone allows all values of other types.
"""

from typing import Any, NamedTuple


class Held(NamedTuple):
    """A keyword that holds: what fits its schema fits, and what does not does not."""

    keyword: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def of(kind: str, **keywords: Any) -> dict[str, Any]:
    """The schema of a type with these keywords beside it."""
    return {"type": kind} | keywords


INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A, A_AND_B = {"a": {}}, {"a": {}, "b": {}}
NODE = of("object", properties={"next": {"$ref": "#/$defs/node"}}, additionalProperties=False)
NAMED = of("object", patternProperties={"^n_": INTEGER}, additionalProperties=False)
ROW = of("array", prefixItems=[INTEGER, STRING], items=False)
UUID = "2eb8aa08-aa98-11ea-b4aa-73b441d16380"
WORDS = {
    "title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, "$comment": "c",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/s", "readOnly": True, "contentMediaType": "text/plain", "x-unknown": 3,
}  # fmt: skip
HELD = [
    Held("type", INTEGER, [0, -7, 12], [1.5, "1", None, [], {}]),
    Held("type (several)", {"type": ["string", "null"]}, ["a", None], [1, True]),
    Held("type number", of("number"), [0, -1.25, 1e30], ["1", True]),
    Held("type boolean", of("boolean"), [True, False], [0, "true"]),
    Held("enum", {"enum": [1, "a", None, [2], {"b": 3}]}, [1, "a", None, [2], {"b": 3}], [2, "b", [3], {}]),
    Held("const", {"const": {"a": [1, "é"]}}, [{"a": [1, "é"]}], [{"a": [1]}, {}, "é"]),
    Held("properties", of("object", properties={"a": INTEGER}), [{"a": 1}, {}], [{"a": "x"}]),
    Held(
        "required",
        of("object", properties=A_AND_B, required=["a", "b"]),
        [{"a": 1, "b": 2}],
        [{}, {"a": 1}, {"b": 2}],
    ),
    Held(
        "additionalProperties false",
        of("object", properties=A, additionalProperties=False),
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    Held(
        "additionalProperties",
        of("object", additionalProperties=of("boolean")),
        [{}, {"x": True}],
        [{"x": 1}],
    ),
    Held("patternProperties", NAMED, [{"n_a": 1}, {}], [{"n_a": "x"}, {"a": 1}]),
    Held(
        "minProperties",
        of("object", minProperties=1, additionalProperties=INTEGER),
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}],
    ),
    Held(
        "maxProperties",
        of("object", maxProperties=1, additionalProperties=INTEGER),
        [{}, {"a": 1}],
        [{"a": 1, "b": 2}],
    ),
    Held("items", of("array", items=INTEGER), [[], [1, 2]], [["a"], [1, None]]),
    Held("prefixItems", ROW, [[1, "a"], [1], []], [["a"], [1, 2], [1, "a", 0]]),
    Held("minItems", of("array", items=INTEGER, minItems=2), [[1, 2], [1, 2, 3]], [[], [1]]),
    Held("maxItems", of("array", items=INTEGER, maxItems=2), [[], [1, 2]], [[1, 2, 3]]),
    Held("minLength", of("string", minLength=2), ["ab", "éé", "abc"], ["", "a", "é"]),
    Held("maxLength", of("string", maxLength=2), ["", "a", "éé"], ["abc", "ééé"]),
    Held("pattern", of("string", pattern="^[a-c]{2}$"), ["ab", "cc"], ["a", "abc", "xx"]),
    Held("pattern (anywhere)", of("string", pattern="b"), ["b", "abc"], ["", "ac"]),
    Held("format date", of("string", format="date"), ["2024-02-29"], ["2024-13-01", "today"]),
    Held("format uuid", of("string", format="uuid"), [UUID], ["2eb8"]),
    Held("format ipv4", of("string", format="ipv4"), ["192.168.0.1"], ["256.1.1.1", "1.2.3"]),
    Held("format email", of("string", format="email"), ["a@b.de"], ["a", "@"]),
    Held("format time", of("string", format="time"), ["12:30:00Z"], ["25:00:00Z", "noon"]),
    Held("format date-time", of("string", format="date-time"), ["2024-02-29T12:30:00Z"], ["2024-02-29"]),
    Held("format duration", of("string", format="duration"), ["P1DT2H"], ["1 day"]),
    Held("format ipv6", of("string", format="ipv6"), ["2001:db8::1"], ["2001:db8", "1.2.3.4"]),
    Held("format hostname", of("string", format="hostname"), ["a.example.com"], ["-a", "a b"]),
    Held("format uri", of("string", format="uri"), ["https://a.de/b?c#d"], ["a b", "//"]),
    Held("minimum", of("integer", minimum=3), [3, 40], [2, -3]),
    Held("maximum", of("integer", maximum=12), [12, 0, -400], [13, 100]),
    Held("minimum, maximum", of("number", minimum=-1.5, maximum=2), [-1.5, 0, 2, 1.25], [-2, 2.5]),
    Held("exclusiveMinimum", of("integer", exclusiveMinimum=3), [4], [3]),
    Held("exclusiveMaximum", of("integer", exclusiveMaximum=3), [2], [3]),
    Held("multipleOf", of("integer", multipleOf=5), [0, 15, -20], [3, 12]),
    Held("anyOf", {"anyOf": [INTEGER, {"const": "a"}]}, [1, "a"], ["b", None]),
    Held("allOf", {"allOf": [of("integer", minimum=2), {"maximum": 5}]}, [2, 5], [1, 6]),
    Held("oneOf (no two of which hold)", {"oneOf": [INTEGER, STRING]}, [1, "a"], [None, True]),
    Held("$ref, $defs", {"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, [1], ["a"]),
    Held(
        "$ref (to itself)",
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}, {"other": {}}],
    ),
    Held("$anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n"} | INTEGER}}, [1], ["a"]),
    Held("definitions", {"$ref": "#/definitions/n", "definitions": {"n": of("null")}}, [None], [1]),
    Held(", ".join(WORDS), INTEGER | WORDS, [1], ["a"]),
    Held("true", of("object", properties={"a": True}), [{"a": [1]}, {}], [1]),
    Held("false", of("object", properties={"a": False}), [{}], [{"a": 1}]),
]

UNIQUE = {"anyOf": [of("null"), of("array", uniqueItems=True)]}
DEPENDENT = {"$defs": {"d": {"dependentRequired": {"a": ["b"]}}}, "$ref": "#/$defs/d"}
# keyword -> a schema with it, and the place where it is refused
REFUSED = {
    "not": ({"properties": {"a": {"not": STRING}}}, "#/properties/a/not"),
    "if, then, else": ({"items": {"if": STRING, "then": {"maxLength": 1}}}, "#/items/if"),
    "contains": (of("array", contains={"const": 1}), "#/contains"),
    "maxContains": (of("array", maxContains=2), "#/maxContains"),
    "uniqueItems": (UNIQUE, "#/anyOf/1/uniqueItems"),
    "dependentRequired": (DEPENDENT, "#/$defs/d/dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "#/dependentSchemas"),
    "dependencies": (of("object", dependencies={"a": ["b"]}), "#/dependencies"),
    "propertyNames": (of("object", propertyNames={"maxLength": 3}), "#/propertyNames"),
    "unevaluatedProperties": (of("object", unevaluatedProperties=False), "#/unevaluatedProperties"),
    "unevaluatedItems": (of("array", unevaluatedItems=False), "#/unevaluatedItems"),
    "oneOf (two of which may hold)": ({"oneOf": [INTEGER, {"minimum": 2}]}, "#/oneOf"),
    "$dynamicRef": ({"properties": {"x": {"$dynamicRef": "#a"}}}, "#/properties/x/$dynamicRef"),
    "$ref to nothing": ({"properties": {"x": {"$ref": "#/$defs/no"}}}, "#/properties/x/$ref"),
    "$ref elsewhere": ({"properties": {"x": {"$ref": "http://a.b/c"}}}, "#/properties/x/$ref"),
    "format unknown": ({"items": of("string", format="colour")}, "#/items/format"),
    "type unknown": ({"properties": {"a/b": of("text")}}, "#/properties/a~1b/type"),
    "pattern with look-ahead": (of("string", pattern="(?=a)"), "#/pattern"),
    "minimum, no number": (of("integer", minimum="1"), "#/minimum"),
    "nothing fits": (of("string", minLength=3, maxLength=2), "#/minLength"),
}


def table() -> str:
    """The article's table: which keywords hold, and which are refused."""
    held = ", ".join(f"`{held.keyword}`" for held in HELD)
    refused = ", ".join(f"`{keyword}`" for keyword in REFUSED)
    rows = [
        "| | keywords |",
        "| --- | --- |",
        f"| hold | {held} |",
        f"| are refused by name and place | {refused} |",
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table())
