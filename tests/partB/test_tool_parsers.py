"""Each parser finds calls in a text: whole, in parts wherever it is cut, and in texts that are no calls."""

import json
import random

import pytest

from engine.server.answer_pieces import Parser, Piece
from engine.server.json_scan import ObjectScan
from engine.server.reasoning import ThinkParser
from engine.server.tool_parsers import CALL_FORMATS, ArgumentsParser, CallParser

NAMES = ("get_weather", "add")
WEATHER = '{"city": "São \\"Paulo\\"", "days": [1, 2.5e3, {"a": null}]}'
# (text, content, calls): what each text is, for each parser.
WHOLE = {
    "hermes": {
        "a call": (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
            "", [("get_weather", WEATHER)],
        ),
        "two calls and a word before": (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n',
            "Let me see.", [("add", "{}"), ("add", '{"a": 1}')],
        ),
        "a word behind": (
            '<tool_call>{"name": "add", "arguments": {}}</tool_call> Done.', " Done.", [("add", "{}")]
        ),
        "no closing mark": ('<tool_call>{"name": "add", "arguments": {}} so', " so", [("add", "{}")]),
    },
    "llama3_json": {
        "a call": (
            f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]
        ),
        "its mark, and a type": (
            '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
            "", [("add", '{"a": 1}')],
        ),
        "two calls": (
            '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
            "", [("add", "{}"), ("add", '{"a": 1}')],
        ),
    },
    "json": {
        "a call": (f'{{"name": "get_weather", "arguments": {WEATHER}}}', "", [("get_weather", WEATHER)]),
        "a list of calls": (
            '[{"name": "add", "arguments": {"a": {}}}, {"name": "add", "arguments": {"a": 1}}]',
            "", [("add", '{"a": {}}'), ("add", '{"a": 1}')],
        ),
        "a word before": ('Yes: {"name": "add", "arguments": {}}', "Yes:", [("add", "{}")]),
    },
}  # fmt: skip
NO_CALLS = {
    "nothing": "",
    "a story": "Once upon a time, there was a dog.\n\nHe ran.  ",
    "spaces": " \n ",
    "other tags": "<tool> <tool_cal> a < b </tool_call>",
    "another tool": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "no arguments": '<tool_call>{"name": "add"}</tool_call>',
    "arguments in a text": '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "no JSON": "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
    "no object": "<tool_call>add(1)</tool_call>",
    "JSON that is no call": '{"answer": {"name": "add", "arguments": {}}, "list": [1, "}"]}',
    "a list": "[1, 2]; [3]",
    "cut off before the arguments": '<tool_call>{"name": "add", "argum',
    "cut off in the mark": "Hello <tool_ca",
    "brackets": "{{{[[[ {} }",
}


def read(parser: Parser, *parts: str) -> tuple[str, list[tuple[str, str]], list[Piece]]:
    """(content, calls, pieces) of a text that comes in these parts."""
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.end()
    content, calls = "", []
    for piece in pieces:
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "call":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls, pieces


CASES = [(name, *case) for name, cases in WHOLE.items() for case in cases.values()]
IDS = [f"{name}: {case}" for name, cases in WHOLE.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=IDS)
def test_calls_are_found_and_the_rest_is_content(name, text, content, calls):
    assert read(CallParser(NAMES, CALL_FORMATS[name]), text)[:2] == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=IDS)
def test_a_text_in_parts_is_the_text_wherever_it_is_cut(name, text, content, calls):
    for cut in range(len(text) + 1):
        got = read(CallParser(NAMES, CALL_FORMATS[name]), text[:cut], text[cut:])[:2]
        assert got == (content, calls), f"cut after {text[:cut]!r}"
    assert read(CallParser(NAMES, CALL_FORMATS[name]), *text)[:2] == (content, calls), (
        "character by character"
    )


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=IDS)
def test_arguments_come_as_they_are_written_and_behind_their_calls_name(name, text, content, calls):
    _, _, pieces = read(CallParser(NAMES, CALL_FORMATS[name]), *text)
    kinds = [piece.kind for piece in pieces]
    assert kinds.count("arguments") > len(calls), "arguments come in pieces, not when a call is over"
    assert kinds.index("call") < kinds.index("arguments")


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_what_is_no_call_stays_content_and_nothing_is_lost(name, text):
    for cut in range(len(text) + 1):
        got = read(CallParser(NAMES, CALL_FORMATS[name]), text[:cut], text[cut:])[:2]
        assert got == (text, []), f"cut after {text[:cut]!r}"


def test_a_call_that_breaks_off_in_its_arguments_says_so_and_keeps_the_rest():
    text = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    for cut in range(len(text) + 1):
        content, calls, pieces = read(CallParser(NAMES, CALL_FORMATS["hermes"]), text[:cut], text[cut:])
        assert calls == [("add", '{"a": ')]
        assert content == "}}</tool_call>"
        assert "broken" in [piece.kind for piece in pieces]


def test_a_call_that_is_cut_off_in_its_arguments_is_a_call():
    content, calls, pieces = read(
        CallParser(NAMES, CALL_FORMATS["json"]), '[{"name": "add", "arguments": {"a": "long'
    )
    assert (content, calls) == ("", [("add", '{"a": "long')])
    assert "broken" not in [piece.kind for piece in pieces]


def test_a_named_tools_answer_is_its_arguments():
    assert read(ArgumentsParser("add"), '{"a"', ": 1}")[:2] == ("", [("add", '{"a": 1}')])


def test_thoughts_come_before_calls():
    text = '<think>\nHm. <tool_call>?\n</think>\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for cut in range(len(text) + 1):
        parser = ThinkParser(CallParser(NAMES, CALL_FORMATS["hermes"]))
        content, calls, pieces = read(parser, text[:cut], text[cut:])
        assert (content, calls) == ("", [("add", "{}")])
        thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        assert thoughts == "\nHm. <tool_call>?\n"


def a_value(draw: random.Random, depth: int = 0):
    kind = draw.randrange(7 if depth < 3 else 5)
    if kind < 5:
        return (draw.choice([1, -2.5, 1e9]), True, None, draw.choice(['a"b', "\\", "é", "\n{"]), "")[kind]
    if kind == 5:
        return {draw.choice("abcd"): a_value(draw, depth + 1) for _ in range(draw.randrange(3))}
    return [a_value(draw, depth + 1) for _ in range(draw.randrange(3))]


def test_an_object_is_done_where_json_says_so_and_broken_as_soon_as_it_can_be_none():
    draw, refused = random.Random(7), 0
    for _ in range(2000):
        text = json.dumps({"k": a_value(draw)}, indent=draw.choice([None, 1]))
        if draw.random() < 0.6:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(["", *'{}[]",:1tx\\ ']) + text[at + draw.randrange(2) :]
        scan, taken = ObjectScan(), 0
        while taken < len(text) and not (scan.is_done or scan.is_broken):
            scan.take(text[taken])
            taken += 1
        try:
            _, end = json.JSONDecoder().raw_decode(text)
            is_object = text.startswith("{")
        except ValueError:
            is_object = False
        assert (scan.is_done and not scan.is_broken) == is_object, text
        assert not is_object or taken == end, text
        refused += not is_object
    assert 500 < refused < 1500, "some are broken and some are not"


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_wrong_last_bracket_of_a_call_is_content(name):
    field = "parameters" if name == "llama3_json" else "arguments"
    mark = "<tool_call>" if name == "hermes" else ""
    parser = CallParser(NAMES, CALL_FORMATS[name])
    pieces = [*parser.feed(f'{mark}{{"name": "add", "{field}": {{}}] so'), *parser.end()]
    assert "broken" in [piece.kind for piece in pieces], "a list's bracket does not end an object"
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    assert content == "] so", "the bracket belongs to no call, and no text is lost"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"name": "add", "arguments": {}} see [1]', " see [1]"),
        ('{"name": "add", "arguments": {}}; that is all; ', "; that is all; "),
        ('{"name": "add", "arguments": {}]', "]"),
        ('{"name": "add", "arguments": {}} so, {"name": "add", "arguments": {}}]', " so"),
    ],
    ids=["a bracket", "spaces", "behind a broken call", "another call"],
)
def test_fillers_behind_the_words_that_follow_a_call_are_content(text, content):
    for cut in range(len(text) + 1):
        got = read(CallParser(NAMES, CALL_FORMATS["json"]), text[:cut], text[cut:])
        assert got[0] == content, f"cut after {text[:cut]!r}"
