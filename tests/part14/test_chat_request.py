"""What a chat request may say at the edges, without a server."""

from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from engine.decoding import chat_template
from engine.decoding.chat_template import ChatError, ChatTemplate
from engine.decoding.params import MAX_LOGPROBS
from engine.server import chat
from engine.server.chat import Chat, ChatRequest
from engine.server.chat_tools import short_json
from engine.server.errors import RequestError
from tests.part06.fakes import TOKENIZER

HI = {"role": "user", "content": "Hi"}


def params(**fields):
    return Chat(TOKENIZER).params(ChatRequest(model="m", messages=[HI], **fields))


def test_both_names_of_the_length_may_say_the_same():
    assert params(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="max_tokens=5 contradicts max_completion_tokens=6"):
        params(max_tokens=5, max_completion_tokens=6)


def test_more_output_than_the_model_sees_is_refused_under_the_name_that_was_sent():
    api = Chat(TOKENIZER)
    api.max_model_len = 200
    for name in ("max_tokens", "max_completion_tokens"):
        assert api.params(ChatRequest(model="m", messages=[HI], **{name: 200})).max_tokens == 200
        with pytest.raises(RequestError, match=f"^{name}=201 is more than max_model_len=200") as caught:
            api.params(ChatRequest(model="m", messages=[HI], **{name: 201}))
        assert (caught.value.status, caught.value.param) == (400, name)
    assert api.params(ChatRequest(model="m", messages=[HI])).max_tokens is None


def test_the_most_likely_tokens_up_to_the_bound():
    assert params(logprobs=True, top_logprobs=MAX_LOGPROBS).logprobs == MAX_LOGPROBS
    with pytest.raises(RequestError, match=f"from 0 to {MAX_LOGPROBS}"):
        params(logprobs=True, top_logprobs=MAX_LOGPROBS + 1)


@pytest.mark.parametrize("field", ["refusal", "annotations", "audio", "function_call"])
def test_what_answers_say_beside_the_text_comes_back_as_nothing_only(field):
    for nothing in (None, []):
        ChatRequest(model="m", messages=[HI | {field: nothing}])
    for something in ({}, "", 0, [{}]):
        words = "is the old name of tool_calls" if "call" in field else "is not supported: null is accepted"
        with pytest.raises(ValidationError, match=f"{field} {words}"):
            ChatRequest(model="m", messages=[HI | {field: something}])


def test_a_template_that_calls_itself_without_end_is_a_template_that_failed():
    template = ChatTemplate("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
    with pytest.raises(ChatError, match="the model's chat template failed: RecursionError"):
        template.render([HI])


def test_the_template_writes_special_tokens_and_the_messages_none(monkeypatch):
    given = {}

    def guarding(messages, special_tokens):
        given["guarded"] = list(special_tokens)
        return messages, "G"

    def encoding(text, tokenizer, config, **options):
        return given.update(options)

    monkeypatch.setattr(chat_template, "guarded", guarding)
    monkeypatch.setattr(chat_template, "prompt_token_ids", encoding)
    added = {
        1: SimpleNamespace(content="<|user|>", special=True),
        2: SimpleNamespace(content="<think>", special=False),
    }
    body = ChatRequest(model="m", messages=[HI])
    chat.prompt_ids(body, SimpleNamespace(added=added), None, ChatTemplate("{{ messages[0].content }}"))
    assert given["guarded"] == ["<|user|>"], "what is added and not special, templates look for in contents"
    assert given["add_special_tokens"] is False, "the template has written all there are: none is added twice"
    assert given["guard"] == "G"


def test_json_may_be_nested_as_deeply_as_is_said_and_no_deeper():
    field = TypeAdapter(Annotated[Any, short_json(100, max_depth=2)])
    assert field.validate_python({"a": [1]}) == {"a": [1]}, "two levels"
    with pytest.raises(ValidationError, match="at most 2 levels of nesting are accepted"):
        field.validate_python({"a": [[]]})


def test_a_character_of_json_counts_as_one():
    field = TypeAdapter(Annotated[Any, short_json(5)])
    assert field.validate_python("é🐉a") == "é🐉a", "and two quotation marks"
    with pytest.raises(ValidationError, match="at most 5 characters"):
        field.validate_python("abcd")


def test_json_that_is_too_deep_to_be_written_is_not_called_too_long():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValidationError, match="too deeply"):
        TypeAdapter(Annotated[Any, short_json(10**6)]).validate_python(value)
