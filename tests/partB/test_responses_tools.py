"""Calls of functions in /v1/responses, judged by OpenAI's own client and its types."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.server.responses_request import ResponsesRequest
from tests.part04.serving import http, openai_client
from tests.partB.saying import ADD, ASK, WEATHER, Says, saying

AUTO = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
ANSWER = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
REQUEST = {"model": "script", "input": "Hi", "tools": TOOLS}


def create(url: str, **fields):
    with openai_client(url) as client:
        answer = client.responses.create(**REQUEST | fields)
        return list(answer) if fields.get("stream") else answer


def test_an_answer_is_thoughts_a_message_and_calls():
    with saying(Says(ANSWER), **AUTO) as url:
        answer = create(url)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    thoughts, message, first, second = answer.output
    assert thoughts.content[0].text == "Hm."
    assert message.content[0].text == answer.output_text == "Let me see."
    assert (first.name, first.arguments, first.status) == ("get_weather", ARGUMENTS, "completed")
    assert first.call_id != second.call_id
    assert (answer.status, answer.tool_choice) == ("completed", "auto")
    assert answer.tools[0].name == "get_weather"
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Hm.</think>"), (
        "bytes are tokens"
    )
    TypeAdapter(Response).validate_python(answer.model_dump(exclude_unset=True, warnings=False))


@pytest.mark.parametrize("size", [1, 1000])
def test_the_events_are_openais_in_openais_order(size):
    with saying(Says(ANSWER, size=size), **AUTO) as url:
        events = create(url, stream=True)
    for event in events[:-1]:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(exclude_unset=True, warnings=False))
    names = [event.type.removeprefix("response.") for event in events]
    names = [name for i, name in enumerate(names) if not name.endswith("delta") or names[i - 1] != name]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert names == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *call, "output_item.done", *call, "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    for index, item in enumerate(final.output[2:], start=2):
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == index
        ]
        assert "".join(deltas) == item.arguments == ARGUMENTS
        added = next(
            event.item
            for event in events
            if event.type == "response.output_item.added" and event.output_index == index
        )
        assert (added.id, added.call_id, added.arguments) == (item.id, item.call_id, "")


def test_a_named_function_is_called():
    with saying(Says(ARGUMENTS), **AUTO) as url:
        answer = create(url, tool_choice={"type": "function", "name": "get_weather"})
    (call,) = answer.output
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)


def test_a_text_without_calls_is_a_message_and_an_empty_one_too():
    with saying(Says("Once"), **AUTO) as url:
        assert create(url).output_text == "Once"
        events = create(url, stream=True)
    assert [item.type for item in events[-1].response.output] == ["message"]
    with saying(Says(""), **AUTO) as url:
        assert [item.type for item in create(url).output] == ["message"]


def test_a_call_that_is_cut_off_is_incomplete():
    with saying(Says(CALL[:-20], "length"), **AUTO) as url:
        answer = create(url)
    assert (answer.status, answer.output[-1].status) == ("incomplete", "incomplete")
    assert answer.output[-1].type == "function_call"


def test_a_conversation_goes_on_with_the_items_as_they_came():
    backend = Says(ANSWER)
    with saying(backend, **AUTO) as url:
        first = create(url)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
            for item in first.output
            if item.type == "function_call"
        ]
        again = create(url, input=[{"role": "user", "content": "Hi"}, *first.output, *outputs])
    assert again.status == "completed"


def test_items_of_one_answer_are_one_turn():
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    items = [
        *ASK,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": "Let me see."},
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "function_call_output", "call_id": "2", "output": "4"},
        call | {"call_id": "3"},
    ]
    chat = ResponsesRequest(input=items).chat("m")
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = chat.messages[1]
    assert (turn.reasoning, turn.content) == ("Hm.", "Let me see.")
    assert [call.id for call in turn.tool_calls] == ["1", "2"]
    assert [message.tool_call_id for message in chat.messages[2:4]] == ["1", "2"]


def test_thoughts_after_a_message_begin_the_next_turn():
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    message = {"type": "message", "role": "assistant", "content": "Let me see."}
    _, first, second = ResponsesRequest(input=[*ASK, message, thoughts, message]).chat("m").messages
    assert (first.reasoning, first.content) == (None, "Let me see.")
    assert (second.reasoning, second.content) == ("Hm.", "Let me see.")


REFUSED = {
    "another type": ({"tools": [{"type": "web_search", "name": "f"}]}, "tools", "'function'"),
    "no name": ({"tools": [{"type": "function"}]}, "tools", "name"),
    "a schema": (
        {"tools": [TOOLS[0] | {"parameters": {"uniqueItems": True}}], "tool_choice": "required"},
        "tools", "tools[0].parameters: uniqueItems",
    ),
    "an unknown function": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "none of"),
    "log probabilities": ({"include": ["message.output_text.logprobs"]}, "include", "no place"),
    "an item": ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "only items of type message"),
    "arguments": (
        {"input": [*ASK, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
        "input", "not JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(fields, param, words):
    with saying(Says("x"), **AUTO) as url, http(url) as client:
        answer = client.post(
            "/v1/responses",
            content=json.dumps(REQUEST | fields).encode(),
            headers={"Content-Type": "application/json"},
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
