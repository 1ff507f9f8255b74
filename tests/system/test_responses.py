"""POST /v1/responses, judged by OpenAI's own client and its types."""

import json
import socket

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.server.admission import Admission
from engine.server.app import create_app
from engine.server.capacity import Capacity, QueueLimits
from engine.server.chat import Chat, chat_routes
from engine.server.responses_route import responses_route
from tests.part04.serving import DEADLINE, ScriptedBackend, client_of, http, openai_client, serve, wait_until
from tests.part06.fakes import CONFIG, TOKENIZER, at_rest, told_alone
from tests.part10.conftest import (  # noqa: F401
    fake_engine,
    passed,
    pytest_runtest_makereport,
    scoring_engine,
)

TEMPLATE = ChatTemplate.from_pretrained("storyteller")
QUESTION = "Tell me about the dog."
SCRIPTED = {"model": "script", "input": "Hi"}
ASK = {"model": "m", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
LONG = {"extra_body": {"ignore_eos": True}}
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LOGPROBS = ["message.output_text.logprobs"]


def alone(*turns: tuple[str, str], ignore_eos: bool = True):
    """What the fake model says to a conversation."""
    text = TEMPLATE.render([{"role": role, "content": content} for role, content in turns])
    return told_alone(text, SamplingParams(temperature=0, max_tokens=20, ignore_eos=ignore_eos))


ALONE = alone(("user", QUESTION))


def route(api: Chat | None = None):
    return responses_route(TOKENIZER, CONFIG, TEMPLATE, api or Chat(TOKENIZER))


@pytest.fixture
def url(scoring_engine, passed):  # noqa: F811
    with (
        at_rest(EngineThread(scoring_engine(), "m"), passed) as backend,
        serve(create_app(backend, [route()])) as url,
    ):
        yield url


@pytest.fixture
def client(url):
    with openai_client(url) as client:
        yield client


def typed(kind, data):
    """`data`, judged by the client's own types, which the client itself does not check."""
    return TypeAdapter(kind).validate_python(data)


def test_a_response_is_the_models_answer_to_the_chat(client):
    answer = client.responses.create(**ASK, **LONG)
    assert answer.output_text == ALONE.text
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "m")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == len(
        TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": QUESTION}]))
    )
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (20, answer.usage.input_tokens + 20)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (answer.temperature, answer.max_output_tokens, answer.top_p) == (0, 20, 1)
    assert answer.model_extra["store"] is False, "nothing is kept"
    typed(Response, answer.model_dump(exclude_unset=True, warnings=False))


def test_an_answer_that_ends_by_itself_is_complete(client):
    ends = next(
        text
        for text in map(str, range(200))
        if alone(("user", text), ignore_eos=False).finish_reason == "stop"
    )
    answer = client.responses.create(**ASK | {"input": ends})
    assert (answer.status, answer.incomplete_details, answer.output[0].status) == (
        "completed",
        None,
        "completed",
    )
    assert answer.output_text == alone(("user", ends), ignore_eos=False).text
    assert answer.completed_at >= answer.created_at
    with client.responses.stream(**ASK | {"input": ends}) as stream:
        assert stream.get_final_response().status == "completed", "the client's helper waits for this event"


@pytest.mark.parametrize("include", [None, LOGPROBS])
def test_the_events_are_openais_in_openais_order(url, client, include):
    with http(url) as plain:
        lines = plain.post(
            "/v1/responses", json={**ASK, "stream": True, "ignore_eos": True, "include": include}
        ).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [body["type"] for body in bodies]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    deltas = names.count("response.output_text.delta")
    assert deltas >= 1
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(body["delta"] for body in bodies if "delta" in body) == ALONE.text
    assert bodies[-5 + 1]["text"] == bodies[-3]["part"]["text"] == ALONE.text
    (message,) = bodies[-1]["response"]["output"]
    assert bodies[-2]["item"] == message
    assert {body["item_id"] for body in bodies if "item_id" in body} == {message["id"]}
    assert bodies[0]["response"]["id"] == bodies[-1]["response"]["id"]
    assert (bodies[0]["response"]["status"], bodies[0]["response"]["output"]) == ("in_progress", [])
    told = [entry for body in bodies if "delta" in body for entry in body["logprobs"]]
    assert told == message["content"][0]["logprobs"]
    assert len(told) == (20 if include else 0)
    for body in bodies[:-1]:
        typed(ResponseStreamEvent, body)
    typed(Response, bodies[-1]["response"])


def test_log_probabilities_if_included(client):
    answer = client.responses.create(**ASK, **LONG, include=LOGPROBS, top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == ALONE.text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert client.responses.create(**ASK, **LONG).output[0].content[0].logprobs == []


def test_a_conversation_is_sent_whole_with_the_answers_as_they_came(client):
    first = client.responses.create(**ASK, **LONG, include=LOGPROBS)
    turn = {
        "role": "user",
        "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "then?"}],
    }
    asked = [{"role": "user", "content": QUESTION, "type": "message"}, *first.output, turn]
    second = client.responses.create(**ASK | {"input": asked}, **LONG, instructions="Be kind.")
    turns = [("system", "Be kind."), ("user", QUESTION), ("assistant", ALONE.text), ("user", "And\nthen?")]
    assert second.output_text == alone(*turns).text
    assert second.instructions == "Be kind."


def test_a_developer_is_a_system_and_the_model_may_be_left_out(client):
    asked = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    ask = {name: value for name, value in ASK.items() if name != "model"}
    answer = client.responses.create(**ask | {"input": asked}, **LONG)
    assert answer.output_text == alone(("system", "Be kind."), ("user", QUESTION)).text
    assert answer.model == "m"


NOTHING = {
    "store": False, "previous_response_id": None, "conversation": None, "background": False, "prompt": None,
    "truncation": "disabled", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "seed": None,
    "service_tier": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"}, "top_logprobs": 0,
    "reasoning": {"effort": "none", "summary": None}, "include": [], "max_tool_calls": None,
    "stream_options": {"include_obfuscation": False}, "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


def test_values_that_ask_for_nothing(client):
    named = {"user": "u", "metadata": {"run": "7"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    answer = client.responses.create(**ASK, extra_body=LONG["extra_body"] | NOTHING | named)
    assert answer.output_text == ALONE.text
    assert {name: getattr(answer, name) for name in named} == named, "a client finds its own names again"


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
REFUSED = {
    "no input": ({"input": []}, "input", "at least 1 item"),
    "a number": ({"input": 3}, "input", "a text or a list of messages"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_text'"
    ),
    "a call": ({"input": [CALL]}, "input", "Extension B"),
    "a tool's answer": ({"input": [RESULT]}, "input", "Extension B"),
    "too many calls": ({"input": [CALL] * 129}, "input", "at most 128"),
    "another item": ({"input": [{"type": "web_search_call"}]}, "input", "only items of type message"),
    "a thought alone": ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
    "too long": ({"input": "dog " * 5000}, "input", "tokens"),
    "too many items": ({"input": [{"role": "user", "content": "x"}] * 2048}, "input", "at most 2047"),
    "tools": ({"tools": [{"type": "function", "name": "f"}]}, "tools", "Extension B"),
    "a schema": ({"text": {"format": {"type": "json_object"}}}, "text", "Extension B"),
    "an earlier answer": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole"),
    "a conversation": ({"conversation": "c"}, "conversation", "not supported"),
    "keeping it": ({"store": True}, "store", "not kept"),
    "the background": ({"background": True}, "background", "false is accepted"),
    "shortened": ({"truncation": "auto"}, "truncation", "disabled"),
    "more than text": ({"include": ["file_search_call.results"]}, "include", LOGPROBS[0]),
    "an effort": ({"reasoning": {"effort": "high"}}, "reasoning", "does not read it"),
    "top without include": ({"top_logprobs": 2}, "top_logprobs", "include"),
    "too many top": ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "20"),
    "no length": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
    "a chat's length": ({"max_tokens": 3}, "max_tokens", "not a field"),
    "a priority": ({"priority": 1}, "priority", "operator"),
    "heat": ({"temperature": -1}, "temperature", "temperature=-1"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(url, fields, param, words, stream):
    with http(url) as plain:
        answer = plain.post("/v1/responses", json=ASK | fields | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert words in error["message"]


def test_a_length_without_room_in_the_queue_is_named_as_it_was_sent(scoring_engine, passed):  # noqa: F811
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    asked = {
        "max_output_tokens": ("/v1/responses", ASK),
        "max_completion_tokens": ("/v1/chat/completions", messages | {"max_completion_tokens": 20}),
        "max_tokens": ("/v1/chat/completions", messages | {"max_tokens": 20}),
    }
    chats = chat_routes(TOKENIZER, CONFIG, TEMPLATE, Chat(TOKENIZER))
    with at_rest(EngineThread(scoring_engine(), "m"), passed) as backend:
        tiny = Capacity(QueueLimits(max_num_queued_reqs=4, max_num_queued_tokens=10), seats=1)
        with serve(create_app(Admission(backend, tiny), [route(), chats])) as url, http(url) as client:
            for name, (path, body) in asked.items():
                error = client.post(path, json=body).json()["error"]
                assert (error["code"], error["param"]) == ("request_too_large", name)


@pytest.mark.parametrize("model", ["gpt-4", ""])
def test_another_model_is_not_found(client, model):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK | {"model": model})


def test_an_answer_is_not_kept(url):
    with http(url) as plain:
        assert plain.get("/v1/responses/resp_1").status_code == 404


def test_an_engine_that_fails_says_so_in_the_stream_and_in_a_whole_answer():
    backend = ScriptedBackend(["one", " two"], error=RuntimeError("no memory"))
    with client_of(backend, extensions=[route()]) as client:
        lines = client.post("/v1/responses", json=SCRIPTED | {"stream": True}).text
        whole = client.post("/v1/responses", json=SCRIPTED)
    deltas = [json.loads(line[6:])["delta"] for line in lines.split("\n") if '"delta":' in line]
    assert deltas == ["one", " two"], "each as it came"
    last = json.loads(lines.strip().split("data: ")[-1])
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert whole.status_code == 500


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_work(stream):
    backend = ScriptedBackend(["one"], endless=True)
    body = json.dumps(SCRIPTED | {"stream": stream}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serve(create_app(backend, [route()])) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            wait_until(lambda: backend.open == 1)
            if stream:
                connection.recv(100)  # the answer has begun
        wait_until(lambda: backend.open == 0)
    assert len(backend.asked) == 1


def test_the_cost_stands_in_the_usage(scoring_engine, passed):  # noqa: F811
    def more(outputs: list[RequestOutput]) -> dict:
        return {"cost": len(outputs)}

    api = Chat(TOKENIZER)
    api.more_usage.append(more)
    with (
        at_rest(EngineThread(scoring_engine(), "m"), passed) as backend,
        serve(create_app(backend, [route(api)])) as url,
        http(url) as client,
    ):
        assert client.post("/v1/responses", json=ASK).json()["usage"]["cost"] == 1


def test_another_name_of_the_model_is_answered_with_its_first():
    api = Chat(TOKENIZER)
    api.name_of_alias = {"team/script-2": "script"}
    with client_of(ScriptedBackend(), extensions=[route(api)]) as client:
        answer = client.post("/v1/responses", json=SCRIPTED | {"model": "team/script-2"})
    assert answer.json()["model"] == "script"
