"""What clients may ask for to harm: it is answered, or refused in one shape that names the field, in bounded
time; and a request that its own constraint ends is its client's error, and nobody else's.
"""

import json

import pytest

from engine.decoding.structured import StructuredOutputsParams, StructureError
from engine.server.answer_pieces import PlainText
from engine.server.chat_tools import Tool
from engine.server.reasoning import ThinkParser
from engine.server.responses_answers import ResponseAnswer
from engine.server.tool_schemas import schema_of_calls
from engine.structured.costs import why_refused
from engine.structured.places import place_of_refusal
from engine.structured.regex import RegexError, parse
from tests.partB.test_grammar import fits, refusal, structure
from tests.partB.test_over_http import CHAT, PROMPT, post, refused, url  # noqa: F401  # a fixture

PRIMES = (9973, 9967, 9949)
LATE = {"type": "string", "pattern": "(.*a.{20,30}){10}"}  # llguidance finds out in the middle of an output


def nested(keyword: str) -> dict:
    """Six patterns, each beside `keyword` with the next one: a text must fit all six."""
    schema = {"pattern": "a"}
    for _ in range(5):
        schema = {"pattern": "a", keyword: [schema]}
    return schema


def circles(num: int) -> dict:
    """In each of `num` circles of two, one has a pattern and the other has none. The first alternative comes
    to the one with the pattern first; in the second, an item must fit the patterns of all circles.
    """
    definitions = {}
    for i in range(num):
        definitions[f"x{i}"] = {"pattern": f".*a.{{{i}}}b", "items": {"$ref": f"#/$defs/y{i}"}}
        definitions[f"y{i}"] = {"items": {"$ref": f"#/$defs/x{i}"}}
    first = {"properties": {f"p{i}": {"$ref": f"#/$defs/x{i}"} for i in range(num)}}
    of_strings = {"items": {"type": "string"}}
    second = {"allOf": [of_strings, *[{"$ref": f"#/$defs/y{i}"} for i in range(num)]]}
    return {"anyOf": [first, second], "$defs": definitions}


def back_and_forth(length: int) -> dict:
    """A chain in which each refers to the next and to the one before; the first has a pattern, so each pass
    over it finds out about one more.
    """
    links = {
        f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{max(i - 1, 0)}"}]}
        for i in range(length)
    }
    links["d0"]["pattern"] = "a"
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {}}}


COSTLY = {
    "options of the library's": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "a large multiple": ({"multipleOf": 99991}, "multipleOf=99991"),
    "multiples at once": ({"anyOf": [{"multipleOf": p} for p in PRIMES]}, "multipleOf=9967"),
    "many multiples": ({"properties": {f"p{i}": {"multipleOf": 97} for i in range(104)}}, "multipleOf=97"),
    "patterns at once": ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(6)]}, "fit 6 patterns"),
    "patterns behind references": (
        {"allOf": [{"$ref": "#/$defs/a"}] * 6, "$defs": {"a": {"pattern": "a"}}}, "fit 6 patterns",
    ),
    "patterns beside alternatives": (nested("anyOf"), "fit 6 patterns"),
    "patterns of one alternative": ({"anyOf": [{"allOf": [{"pattern": "a"}] * 6}, {}]}, "fit 6 patterns"),
    "patterns beside one of": (nested("oneOf"), "fit 6 patterns"),
    "patterns of one item": ({"allOf": [{"items": {"pattern": "a"}}] * 6}, "fit 6 patterns"),
    "many properties": ({"properties": {f"p{i}": {} for i in range(1001)}}, "properties has 1001 names"),
    "a bound beyond 64 bits": ({"minimum": 2**63 + 2**11}, "minimum=9223372036854777856"),
    "a bound without an exact float": ({"maximum": 2**53 + 1}, "maximum=9007199254740993"),
    "patterns of items in a circle": (circles(6), "fit 6 patterns"),
    "a pattern more in each item": (
        {"$ref": "#/$defs/a", "$defs": {
            "a": {"items": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
            "b": {"pattern": "b", "items": {"$ref": "#/$defs/b"}}}},
        "fit 6 patterns",
    ),
    "references back and forth": (back_and_forth(200), "$ref and allOf join too many schemas"),
}  # fmt: skip
FINE = (
    {"multipleOf": 10_000_000}, {"multipleOf": 0.01}, {"maximum": 2**63 - 1}, {"minimum": -(2**63)},
    {"const": {"multipleOf": 99991}}, {"properties": {"multipleOf": {"const": 99991}}}, {"minimum": 0.1},
    {"allOf": [{"pattern": "a"}] * 5}, {"properties": {f"p{i}": {"pattern": "a"} for i in range(50)}},
    {"multipleOf": 0}, {"multipleOf": True}, {"$ref": "#"}, {"$ref": "#/nowhere"},
    {"allOf": [{"$ref": "#/allOf/0"}]}, {"anyOf": [{"pattern": "a"}] * 50},
    {"allOf": [{"pattern": "a"}] * 5, "$defs": {"a": {"pattern": "a"}}},
    {"allOf": [{"properties": {f"p{i}": {"pattern": "a"}}} for i in range(6)]}, {"anyOf": []}, circles(5),
    {"allOf": [{"prefixItems": [{}] * i + [{"format": "date"}]} for i in range(6)]},
    {"allOf": [{"properties": {"child": {"$ref": "#"}}}, {"properties": {"name": {"pattern": "a"}}}]},
)  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_a_schema_that_would_take_minutes_or_be_misread_is_refused_by_its_keyword(name):
    schema, says = COSTLY[name]
    assert says in (why_refused(schema) or "")
    assert says in refusal(json=schema)


@pytest.mark.parametrize("schema", FINE, ids=lambda schema: json.dumps(schema)[:40])
def test_what_looks_alike_and_costs_little_is_not_refused(schema):
    assert why_refused(schema) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "\ud800"}, {"choice": ["a", "\udfff"]}, {"grammar": 'start: "\ud800"'},
        {"json": {"enum": ["\ud800"]}}, {"json": '{"enum": ["\\ud800"]}'},
        {"json": {}, "whitespace_pattern": "\ud800"},
    ],
)  # fmt: skip
def test_half_a_character_is_refused_by_name(asked):
    with pytest.raises(StructureError, match=r"lone surrogate U\+D[8F]") as caught:
        StructuredOutputsParams(**asked)
    assert caught.value.field == list(asked)[-1]


@pytest.mark.parametrize("grammar", ["start: <|endoftext|>", "start: start", "start: a\na: a"])
def test_a_grammar_that_no_text_fits_is_refused(grammar):
    assert refusal(grammar=grammar).endswith("no text fits")


def test_a_choice_may_have_any_character():
    for text in ("\x7f", "\0", '"\\', "\u2028", "a\nb", "😀"):
        assert fits(structure(choice=[text, "other"]), text), repr(text)


def test_data_in_a_schema_is_no_schema():
    """What a const says is neither closed nor moved."""
    data = {"properties": {"$ref": "#/x"}}
    closed = structure(json={"const": data}, disable_additional_properties=True)
    assert fits(closed, json.dumps(data))
    parameters = {"type": "object", "properties": {"a": {"const": data}}, "required": ["a"]}
    tool = Tool(type="function", function={"name": "f", "parameters": parameters})
    calls = structure(json=schema_of_calls([tool], "arguments", 1))
    assert fits(calls, json.dumps([{"name": "f", "arguments": {"a": data}}]))


def test_a_tools_schema_with_a_name_of_its_own_keeps_its_references():
    parameters = {
        "$id": "http://a/b", "type": "object", "required": ["a"], "definitions": {"x": {"const": 5}},
        "properties": {"a": {"$ref": "#/definitions/x"}},
    }  # fmt: skip
    tool = Tool(type="function", function={"name": "f", "parameters": parameters})
    calls = structure(json=schema_of_calls([tool], "arguments", 1))
    assert fits(calls, '[{"name": "f", "arguments": {"a": 5}}]')
    assert not fits(calls, '[{"name": "f", "arguments": {"a": 6}}]')


SAID = {"type": "json_schema", "json_schema": {"name": "a", "schema": LATE}}


@pytest.mark.parametrize(
    "sent",
    [
        {"structured_outputs": {"json": LATE}}, {"response_format": SAID},
        {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
    ],
)  # fmt: skip
def test_a_constraint_that_fails_in_an_output_is_a_400_that_names_its_field(url, sent):  # noqa: F811
    asked = PROMPT | {"temperature": 0} | sent
    (name, *_) = sent
    error = refused(url, **asked)
    assert error["param"] == name
    assert ("structured_outputs" in error["message"]) == (name == "structured_outputs")
    events = post(url, "/v1/completions", **asked, stream=True).text.split("\n\n")
    told = json.loads(events[-3].removeprefix("data: "))["error"]
    assert (told["param"], told["type"]) == (name, "invalid_request_error"), "as an event of a stream"
    assert post(url, "/v1/completions", **PROMPT).status_code == 200, "others go on"


def test_a_response_tells_of_it_in_its_own_words(url):  # noqa: F811
    body = {"input": "hi", "temperature": 0, "text": {"format": {"type": "json_schema", "name": "a"}}}
    body["text"]["format"]["schema"] = LATE
    assert refused(url, "/v1/responses", body)["param"] == "text"
    last = post(url, "/v1/responses", **body, stream=True).text.strip().split("\n")[-1]
    failed = json.loads(last.removeprefix("data: "))["response"]
    assert failed["error"]["code"] == "invalid_prompt"
    ResponseAnswer.model_validate(failed)  # raises for a field or a value that /openapi.json does not have


def test_a_number_beyond_the_last_character_is_refused():
    assert parse("\\U0010ffff")
    with pytest.raises(RegexError, match="8 hexadecimal digits of a character"):
        parse("\\U00110000")


def test_thoughts_without_a_character_are_no_piece():
    pieces = ThinkParser(PlainText()).feed("<think></think>yes")
    assert [piece.kind for piece in pieces] == ["content"]


def test_the_search_for_a_place_ends_when_its_time_is_over(monkeypatch):
    """However many parts are left: of a thousand, ten are tried, and none is searched any deeper."""
    ticks, tried = iter(range(10_000)), []
    monkeypatch.setattr("engine.structured.places.time.thread_time", lambda: next(ticks))
    monkeypatch.setattr("engine.structured.places.MAX_SECONDS", 10)

    def no_not(schema: dict) -> str | None:
        tried.append(schema)
        return "not" if "not" in schema else None

    schema = {"properties": {f"p{i}": {} for i in range(1000)}, "not": {}}
    assert place_of_refusal(schema, no_not) == "#"
    assert len(tried) == 10
