"""Calls of tools over HTTP, judged by OpenAI's own client: whole and in deltas."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.part04.serving import http, openai_client
from tests.partB.saying import ADD, ASK, WEATHER, Says, saying

AUTO = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
ARGUMENTS = '{"city": "São Paulo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}\n</tool_call>'
LIST = '[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BOTH = {"tools": [WEATHER, ADD]}
# name -> (what the model says, fields of the request, content, calls, finish_reason)
CASES = {
    "a call": (CALL, BOTH, None, [("get_weather", ARGUMENTS)], "tool_calls"),
    "two calls and a word": (
        TWO, BOTH, "Let me see.", [("get_weather", ARGUMENTS), ("add", '{"a": 1, "b": 2}')], "tool_calls"
    ),
    "one call at most": (
        TWO, BOTH | {"parallel_tool_calls": False}, "Let me see.", [("get_weather", ARGUMENTS)], "tool_calls"
    ),
    "no call": ("Once upon a time", BOTH, "Once upon a time", [], "stop"),
    "none": (CALL, BOTH | {"tool_choice": "none"}, CALL, [], "stop"),
    "required": (
        LIST, BOTH | {"tool_choice": "required"}, None,
        [("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')], "tool_calls",
    ),
    "named": (ARGUMENTS, BOTH | {"tool_choice": NAMED}, None, [("get_weather", ARGUMENTS)], "stop"),
    "a tool that was not offered": (CALL, {"tools": [ADD]}, CALL, [], "stop"),
}  # fmt: skip


def chat(url: str, **fields):
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="script", messages=ASK, **fields)
        return list(answer) if fields.get("stream") else answer


def added_up(url: str, **fields):
    """The choice that the client's helper makes of the deltas, by its own rules."""
    with (
        openai_client(url) as client,
        client.chat.completions.stream(model="script", messages=ASK, **fields) as stream,
    ):
        return stream.get_final_completion().choices[0]


def calls_of(message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize(("text", "fields", "content", "calls", "reason"), CASES.values(), ids=CASES)
def test_a_whole_answer_has_its_calls(text, fields, content, calls, reason):
    with saying(Says(text), **AUTO) as url:
        answer = chat(url, **fields)
    (choice,) = answer.choices
    assert (choice.message.content, calls_of(choice.message)) == (content, calls)
    assert choice.finish_reason == reason
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(calls)
    TypeAdapter(ChatCompletion).validate_python(answer.model_dump(exclude_unset=True, warnings=False))


@pytest.mark.parametrize(("text", "fields", "content", "calls", "reason"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_deltas_are_openais_and_add_up_to_the_whole_answer(text, fields, content, calls, reason, size):
    with saying(Says(text, size=size), **AUTO) as url:
        chunks = chat(url, stream=True, **fields)
        final = added_up(url, **fields)
    assert (final.message.content or None, calls_of(final.message)) == (content, calls)
    assert final.finish_reason == reason
    begun: dict[int, str] = {}
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk.model_dump(exclude_unset=True))
        (choice,) = chunk.choices
        for part in choice.delta.tool_calls or ():
            if part.index not in begun:
                assert part.index == len(begun), "calls begin in their order"
                assert part.id, "the first delta of a call has its id, type and name"
                assert (part.type, part.function.name) == ("function", calls[part.index][0])
                begun[part.index] = part.id
            else:
                assert (part.id, part.type, part.function.name) == (None, None, None), "later ones do not"
    assert len(set(begun.values())) == len(calls)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_arguments_are_sent_as_they_come():
    with saying(Says(CALL), **AUTO) as url:
        chunks = chat(url, stream=True, **BOTH)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert len(parts) > len(ARGUMENTS) / 2


def test_a_call_that_is_cut_off_says_so_by_its_finish_reason():
    text = CALL[: CALL.index("Paulo")]
    with saying(Says(text, "length"), **AUTO) as url:
        (choice,) = chat(url, **BOTH).choices
    assert calls_of(choice.message) == [("get_weather", '{"city": "São ')]
    assert choice.finish_reason == "length", "a program knows that it should not call"


def test_a_call_with_broken_arguments_is_content_or_in_a_stream_loses_nothing():
    text = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    with saying(Says(text), **AUTO) as url:
        (choice,) = chat(url, **BOTH).choices
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"
        final = added_up(url, tools=[ADD])
    assert final.message.tool_calls[0].function.arguments + final.message.content == '{"a": }}</tool_call>'
    assert final.finish_reason == "stop", "what was begun is not a call to be made"


def test_each_of_several_answers_has_its_own_calls():
    with saying(Says(CALL, n=2), **AUTO) as url:
        first, second = chat(url, n=2, **BOTH).choices
        assert calls_of(first.message) == calls_of(second.message)
        assert first.message.tool_calls[0].id != second.message.tool_calls[0].id
        chunks = chat(url, n=2, stream=True, **BOTH)
    for index in (0, 1):
        parts = [
            p for c in chunks for p in c.choices[0].delta.tool_calls or () if c.choices[0].index == index
        ]
        assert "".join(part.function.arguments or "" for part in parts) == ARGUMENTS


def test_a_conversation_goes_on_with_the_answer_as_it_came():
    backend = Says(CALL)
    with saying(backend, **AUTO) as url:
        answer = chat(url, **BOTH).choices[0].message
        with openai_client(url) as client:
            turns = [
                *ASK,
                answer,
                {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "Sunny."},
            ]
            client.chat.completions.create(model="script", messages=turns, **BOTH)
        with http(url) as plain:
            messages = [turns[0], answer.model_dump(exclude_none=True), turns[2]]
            tokens = plain.post("/tokenize", json={"messages": messages})
    assert tokens.status_code == 200, tokens.text
    assert tokens.json()["count"] > 0


def deep(levels: int) -> dict:
    schema: dict = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "f"} | function}


def turn(**call) -> dict:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}} | call
    return {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


HOSTILE = {
    "ten thousand tools": {"tools": [tool(name=f"f{i}") for i in range(10_000)]},
    "a deep schema": {"tools": [tool(parameters=deep(200))]},
    "a long schema": {"tools": [tool(parameters={"description": "x" * 100_000})]},
    "a long description": {"tools": [tool(description="x" * 100_000)]},
    "a name with control characters": {"tools": [tool(name="a\u0000\u001b[31m")]},
    "a name of two lines": {"tools": [tool(name="a\nb")]},
    "a name with an end of line": {"tools": [tool(name="a\n")]},
    "a long name": {"tools": [tool(name="a" * 65)]},
    "an id of a megabyte": turn(id="x" * 900_000),
    "an empty id": {"messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": ""}]},
    "an id to answer of a megabyte": {
        "messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": "x" * 900_000}]
    },
    "a thousand calls": {
        "messages": [*ASK, {"role": "assistant", "tool_calls": turn()["messages"][1]["tool_calls"] * 1000}]
    },
    "half a character": turn(function={"name": "f", "arguments": '{"a": "\\ud800"}'}),
    "a tool that is a number": {"tools": [7]},
    "a schema that is a list": {"tools": [tool(parameters=[])]},
    "another field": {"tools": [tool(code="import os")]},
    "another type": {"tools": [{"type": "code_interpreter"}]},
    "a choice that is a list": {"tools": [tool()], "tool_choice": ["f"]},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_is_a_400_of_the_one_shape(fields):
    with saying(Says("hi"), **AUTO) as url, http(url) as client:
        body = json.dumps({"model": "script", "messages": ASK} | fields).encode()
        answer = client.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] in ("tools", "tool_choice", "messages")
    assert len(error["message"]) <= 501
