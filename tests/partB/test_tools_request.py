"""What a request with tools asks of the engine and of the template, without a server."""

import asyncio
import json

import pytest

from engine.decoding.chat_template import ChatTemplate, chat_prompt
from engine.server.chat import prompt_ids, read_prompt
from engine.server.chat_request import ChatRequest, Message
from engine.server.errors import RequestError
from engine.server.tool_schemas import schema_of_calls
from tests.part06.fakes import EOS, TOKENIZER
from tests.partB.saying import ADD, ASK, LONG, TEMPLATE, WEATHER, chat_of

NAMED = {"type": "function", "function": {"name": "add"}}
AUTO = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}


def body(**fields) -> ChatRequest:
    return ChatRequest(**{"model": "m", "messages": ASK} | fields)


def schema(**fields):
    """The schema that the output must fit; None for none."""
    structure = chat_of(**fields.pop("flags", {})).params(body(**fields)).structured_outputs
    return structure and structure.json


def refusal(**fields) -> RequestError:
    chat = chat_of(**fields.pop("flags", {}))

    def ask() -> None:
        asked = body(**fields)
        chat.params(asked)
        asyncio.run(read_prompt(asked, TOKENIZER, LONG, TEMPLATE, chat.extension))

    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.status == 400
    return caught.value


def test_a_required_call_is_a_list_of_calls_that_fit_their_tools():
    got = schema(tools=[WEATHER, ADD], tool_choice="required")
    assert (got["type"], got["minItems"]) == ("array", 1)
    weather, add = got["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "get_weather"}
    assert set(add["required"]) == {"name", "arguments"}
    assert got["$defs"]["tool0"] == WEATHER["function"]["parameters"]


def test_a_tools_references_to_itself_hold_inside_the_larger_schema():
    got = schema(tools=[WEATHER, ADD], tool_choice="required")
    place = got["$defs"]["tool1"]["properties"]["a"]["$ref"]
    assert place == "#/$defs/tool1/$defs/n"
    target = got
    for name in place.removeprefix("#/").split("/"):
        target = target[name]
    assert target == ADD["function"]["parameters"]["$defs"]["n"]


def test_one_call_at_most_without_parallel_calls():
    assert schema(tools=[ADD], tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1
    assert schema(tools=[ADD], tool_choice="required")["maxItems"] > 1


def test_a_named_tools_answer_fits_its_arguments():
    assert schema(tools=[WEATHER, ADD], tool_choice=NAMED) == ADD["function"]["parameters"]
    nothing = {"type": "function", "function": {"name": "add"}}
    assert schema(tools=[nothing], tool_choice=NAMED)["properties"] == {}, "no parameters, no arguments"


def test_arguments_have_the_name_that_the_model_learned():
    flags = {"tool_call_parser": "llama3_json"}
    got = schema(tools=[ADD], tool_choice="required", flags=flags)
    assert "parameters" in got["items"]["properties"]
    assert "arguments" in schema_of_calls(body(tools=[ADD]).tools, "arguments", 1)["items"]["properties"]


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_what_the_model_may_leave_is_no_constraint(choice):
    assert schema(tools=[ADD], tool_choice=choice, flags=AUTO) is None


def test_auto_needs_both_flags_in_vllms_words():
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    for flags in ({}, {"tool_call_parser": "hermes"}):
        for choice in (None, "auto"):
            assert refusal(tools=[ADD], tool_choice=choice, flags=flags).message == words
    assert schema(tools=[ADD], tool_choice="none") is None, "none needs no parser"
    assert schema(tool_choice="auto") is None, "and no tools ask for nothing"


REFUSED = {
    "no tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "an unknown name": ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "none of tools: get_wea"),
    "a name twice": ({"tools": [ADD, ADD], "tool_choice": "none"}, "tools", "tools[1].function.name='add'"),
    "a list for arguments": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools", "tools[0].function.parameters.type='array'",
    ),
    "a keyword that is unknown": (
        {"tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"x": {"uniqueItems": True}}}}}], "tool_choice": "required"},
        "tools", "tools[1].function.parameters: uniqueItems is unknown at #/x",
    ),
    "thoughts left out": ({"include_reasoning": False}, "include_reasoning", "needs --reasoning-parser"),
    "arguments that are no JSON": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL | {"function": {
            "name": "f", "arguments": "{"}}]}]},
        "messages", "messages[1].tool_calls[0].function.arguments is not JSON",
    ),
    "arguments that are no object": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL | {"function": {
            "name": "f", "arguments": "[1]"}}]}]},
        "messages", "an object is accepted",
    ),
    "arguments without a bottom": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL | {"function": {
            "name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}}]}]},
        "messages", "arguments",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(fields, param, words):
    error = refusal(**fields)
    assert error.param == param
    assert words in error.message


def rendered(messages, template=TEMPLATE, **fields) -> str:
    chat = chat_of(**AUTO)
    ids = prompt_ids(body(messages=messages, **fields), TOKENIZER, LONG, template, chat.extension)
    return TOKENIZER.decode(ids)


def test_the_template_reads_tools_as_they_were_sent():
    assert rendered(ASK, tools=[ADD]).startswith(f"[[{json.dumps(ADD)}]]<user>Hi")
    assert rendered(ASK).startswith("<user>Hi")


def test_turns_of_tools_reach_the_template_with_arguments_as_objects():
    turns = [
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    want = '<user>Hi<assistant>(Hm.)add={"a": 1, "b": "é"};<tool>3#call_1<assistant>'
    assert rendered([*ASK, *turns]) == want


def test_the_text_is_hugging_faces():
    from transformers import AutoTokenizer

    from engine.models.checkpoint import ZOO

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    theirs = AutoTokenizer.from_pretrained(ZOO / "storyteller").apply_chat_template(
        turns, tools=[ADD], chat_template=TEMPLATE_SOURCE, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(TEMPLATE_SOURCE).render(turns, tools=[ADD]) == theirs


TEMPLATE_SOURCE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
)


def test_a_template_that_knows_no_tools_gets_their_turns_as_text():
    storyteller = ChatTemplate.from_pretrained("storyteller")
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    text = '[{"name": "add", "arguments": {"a": 1, "b": "é"}}]'
    plain = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "3"}]
    want = storyteller.render(plain)
    assert rendered(turns, storyteller, tools=[ADD]) == TOKENIZER.decode(TOKENIZER.encode(want))


def test_no_text_of_tools_or_calls_spells_a_special_token():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"<end>": ["<end>"]}}}
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "<end>"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<end>"}}]
    text, ids = chat_prompt(turns, TEMPLATE, TOKENIZER, LONG, tools=tools)
    assert text.count("<end>") == 4, "the text stays as it is"
    assert EOS not in ids, "and none of it is the token"


def test_an_assistants_turn_may_be_calls_alone():
    message = Message(role="assistant", content=None, tool_calls=[CALL])
    assert message.plain()["content"] == ""
