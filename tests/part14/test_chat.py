"""OpenAI's chat API and /generate, judged by OpenAI's own client."""

import json
from dataclasses import replace

import openai
import pytest

from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.decoding.params import SamplingParams
from engine.server.app import create_app
from engine.server.chat import chat_routes
from tests.part04.serving import http, openai_client, serve
from tests.part06.fakes import TOKENIZER, at_rest, told_alone

TEMPLATE = ChatTemplate.from_pretrained("storyteller")
QUESTION = [{"role": "user", "content": "Tell me about the dog."}]
ASK = {
    "model": "m", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 20,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ALONE = told_alone(TEMPLATE.render(QUESTION), GREEDY)


@pytest.fixture
def url(serving):
    return serving()


@pytest.fixture
def client(url):
    with openai_client(url) as client:
        yield client


def test_a_message_is_what_the_model_says_after_the_template(client):
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", ALONE.text)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(TEMPLATE.render(QUESTION)))
    assert answer.usage.completion_tokens == 20


def test_a_truncated_conversation_keeps_its_end(client):
    """So a conversation that is longer than the model's length is answered."""
    question = [{"role": "user", "content": "x" * 500 + QUESTION[0]["content"]}]
    body = {"ignore_eos": True, "truncate_prompt_tokens": 40}
    answer = client.chat.completions.create(**ASK | {"messages": question, "extra_body": body})
    alone = told_alone(TEMPLATE.render(question)[-40:], GREEDY)
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.prompt_tokens == 40
    body = {"truncate_prompt_tokens": 500}
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens=500: at most 199") as caught:
        client.chat.completions.create(**ASK | {"messages": question, "extra_body": body})
    assert caught.value.param == "truncate_prompt_tokens"


def test_words_that_are_bad_and_tokens_that_are_allowed(client):
    body = {"bad_words": ["ab", "c"], "allowed_token_ids": [*b"abcd"]}
    answer = client.chat.completions.create(**ASK | {"extra_body": body})
    text = answer.choices[0].message.content
    assert text == told_alone(TEMPLATE.render(QUESTION), replace(GREEDY, ignore_eos=False, **body)).text
    assert set(text) <= set("abd")
    assert "ab" not in text


def test_a_stream_begins_with_the_role_and_its_deltas_are_the_message(client):
    chunks = list(
        client.chat.completions.create(**ASK, n=2, stream=True, stream_options={"include_usage": True})
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    choices = [choice for chunk in chunks for choice in chunk.choices]
    opening, deltas = choices[:2], choices[2:]
    assert [(c.index, c.delta.role, c.delta.content) for c in opening] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    assert not any(c.delta.role for c in deltas), "the role comes once"
    for index in (0, 1):
        own = [c for c in deltas if c.index == index]
        assert "".join(c.delta.content for c in own) == ALONE.text
        assert [c.finish_reason for c in own if c.finish_reason] == ["length"]


def test_openais_own_helper_puts_the_message_together(client):
    stop = ALONE.text[10:12]
    ask = {**ASK, "logprobs": True, "stop": stop, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ALONE.text.partition(stop)[0])
    assert "".join(deltas) == choice.message.content
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == final.usage.completion_tokens, "those of the stop string, too"


def test_parts_of_text_are_lines_and_a_developer_is_a_system(client):
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "about the dog."}]
    one = client.chat.completions.create(
        **ASK
        | {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]}
    )
    other = client.chat.completions.create(
        **ASK | {"messages": [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me\nabout the dog."}
        ]}
    )  # fmt: skip
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage == other.usage


def test_a_conversation_goes_on_with_the_message_as_it_came(client):
    """As every example of OpenAI's client does: the answer's own object is the next request's message."""
    answer = client.chat.completions.create(**ASK).choices[0].message
    turn = {"role": "user", "content": "And then?"}
    second = client.chat.completions.create(**ASK | {"messages": [*QUESTION, answer, turn]})
    text = TEMPLATE.render([*QUESTION, {"role": "assistant", "content": ALONE.text}, turn])
    assert second.choices[0].message.content == told_alone(text, GREEDY).text


def test_what_a_message_spells_is_no_special_token(client):
    """`<end>` is the fake tokenizer's only special token: one token, or five bytes as here."""
    counts = []
    for content in ("<end>", "[end]"):
        answer = client.chat.completions.create(**ASK | {"messages": [{"role": "user", "content": content}]})
        counts.append(answer.usage.prompt_tokens)
    assert counts[0] == counts[1], "a special token that a user writes out became one token"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_the_chat_shape(client, stream):
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    assert b"".join(bytes(e.bytes) for e in entries).decode(errors="replace") == ALONE.text
    assert len(entries) == 20
    assert all(len(e.top_logprobs) == 3 for e in entries)
    for e in entries:
        assert e.top_logprobs[0].token == e.token, "greedy: the likeliest"
        assert e.top_logprobs[0].logprob == e.logprob


def test_no_logprobs_but_the_chosen_tokens(client):
    answer = client.chat.completions.create(**ASK, logprobs=True)
    assert all(e.top_logprobs == [] for e in answer.choices[0].logprobs.content)


def test_an_answer_is_as_long_as_the_model_allows_unless_a_length_is_given(client):
    ask = {name: value for name, value in ASK.items() if name != "max_completion_tokens"}
    answer = client.chat.completions.create(**ask)
    assert answer.usage.completion_tokens > 100
    assert answer.choices[0].finish_reason == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat.completions.create(**ask | {name: 3}).usage.completion_tokens == 3


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED = {
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    "a tool's answer": ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
    "content left out": ({"messages": [{"role": "user"}]}, "messages"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "messages"),
    "a number for content": ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    "a name of another kind": ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages"),
    "a special token for a name": (
        {"messages": [{"role": "user", "content": "x", "name": "<end>"}]}, "messages"
    ),
    "tool calls": ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
    "too many messages": ({"messages": QUESTION * 3000}, "messages"),
    "too long": ({"messages": [{"role": "user", "content": "dog " * 5000}]}, "messages"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools"),
    "a choice of tools": ({"extra_body": {"tool_choice": "required"}}, "tool_choice"),
    "a schema": ({"extra_body": {"structured_outputs": {"choice": ["yes"]}}}, "structured_outputs"),
    "beams": ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    "keeping it": ({"store": True}, "store"),
    "a tier": ({"service_tier": "flex"}, "service_tier"),
    "a voice": ({"modalities": ["text", "audio"]}, "modalities"),
    "a guess": ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    "much metadata": ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    "an effort": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "a template": ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
    "variables of another kind": ({"extra_body": {"chat_template_kwargs": [1]}}, "chat_template_kwargs"),
    "many variables": ({"extra_body": {"chat_template_kwargs": {"a": "x" * 20_000}}}, "chat_template_kwargs"),
    "a variable with a field of its own": (
        {"extra_body": {"chat_template_kwargs": {"add_generation_prompt": False}}}, "chat_template_kwargs"
    ),
    "to go on and to begin": ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
    "the prompt's, streamed": ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
    "too many of the prompt's": ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    "a format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "too many top": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a completion's logprobs": ({"logprobs": 3}, "logprobs"),
    "lengths that differ": ({"max_tokens": 3}, "max_completion_tokens"),
    "no length": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "another model": ({"model": "gpt-4"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(client, body, param):
    with pytest.raises(openai.BadRequestError if param else openai.NotFoundError) as refused:
        client.chat.completions.create(**ASK | body)
    if param:
        assert refused.value.param == param
        assert param in refused.value.message
        assert "Value error" not in refused.value.message, "pydantic's word, and nobody's value"


def test_a_plain_text_format_is_what_there_is(client):
    answer = client.chat.completions.create(**ASK, response_format={"type": "text"})
    assert answer.choices[0].message.content == ALONE.text


def test_a_model_without_a_template_has_no_chat(scoring_engine, passed):
    engine = scoring_engine()
    with at_rest(EngineThread(engine, "m"), passed) as backend:
        app = create_app(backend, [chat_routes(engine.tokenizer, engine.config, None)])
        refused = pytest.raises(openai.BadRequestError, match="no chat template")
        with serve(app) as url, openai_client(url) as client, refused:
            client.chat.completions.create(**ASK)


def test_generate_streams_text_and_says_why_it_ended(url):
    prompt = "The dog and the ball"
    with (
        http(url) as client,
        client.stream(
            "POST", "/generate", json={"prompt": prompt, "max_tokens": 8, "temperature": 0}
        ) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    alone = told_alone(prompt, SamplingParams(temperature=0, max_tokens=8))
    assert "".join(event["text"] for event in events) == alone.text
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + [
        alone.finish_reason
    ]
    assert events[-1]["completion_tokens"] == len(alone.token_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
     ({"prompt": "x", "stream": True}, "stream"), ({"prompt": "x", "temperature": -1}, "temperature")],
)  # fmt: skip
def test_generate_refuses_by_name(url, body, param):
    with http(url) as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(url, stream):
    body = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with http(url) as client:
        answer = client.post("/v1/chat/completions", json=body | {"return_token_ids": True, "stream": stream})
    if not stream:
        (choice,) = answer.json()["choices"]
        assert answer.json()["prompt_token_ids"] == TOKENIZER.encode(TEMPLATE.render(QUESTION))
        assert (choice["token_ids"], choice["stop_reason"]) == (list(ALONE.token_ids), None)
        return
    chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]
    assert chunks[0]["prompt_token_ids"] == TOKENIZER.encode(TEMPLATE.render(QUESTION))
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    assert ids == list(ALONE.token_ids)


def test_tokens_of_a_chat_may_be_named_by_their_ids(client):
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    (choice,) = client.chat.completions.create(
        **ASK | {"extra_body": extra}, logprobs=True, top_logprobs=2
    ).choices
    assert [token.token for token in choice.logprobs.content] == [f"token_id:{id}" for id in ALONE.token_ids]
    assert all(
        top.token.startswith("token_id:") for token in choice.logprobs.content for top in token.top_logprobs
    )


def test_the_opening_says_what_the_prompt_has_cost(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options=options))
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks]
    prompt = len(TOKENIZER.encode(TEMPLATE.render(QUESTION)))
    assert (counts[0], counts[-1]) == ((prompt, 0), (prompt, 20))
    assert counts == sorted(counts)
