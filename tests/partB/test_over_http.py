"""Structured output over HTTP: OpenAI's response_format, vLLM's structured_outputs, streams, and refusals."""

import json
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel

from engine import EngineArgs
from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.server.app import create_app
from engine.server.chat import Chat, chat_routes
from engine.server.responses_route import responses_route
from engine.wiring.compose import build_engine
from tests.part04.serving import openai_client, serve

PROMPT = {"prompt": "Once upon a time, there was a dog", "max_tokens": 60, "temperature": 0.8, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "Tell me about a dog"}], "max_tokens": 80, "seed": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}, "age": {"enum": [3, 4]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA, "strict": True}}


class Dog(BaseModel):
    name: Literal["Max", "Tim"]
    age: Literal[3, 4]


@pytest.fixture(scope="module")
def url():
    engine = build_engine(
        EngineArgs(
            model="storyteller", device="cpu", structured_outputs_config={"disable_any_whitespace": True}
        )
    )
    template = ChatTemplate.from_pretrained("storyteller")
    parts = (engine.tokenizer, engine.config, template)
    routes = [chat_routes(*parts), responses_route(*parts, Chat(engine.tokenizer))]
    backend = EngineThread(engine, "m")
    backend.start()
    with serve(create_app(backend, routes)) as url:
        yield url
    backend.stop()


def post(url: str, path: str, **body):
    return httpx.post(f"{url}{path}", json=body, timeout=240)


def refused(url: str, path: str = "/v1/completions", base: dict = PROMPT, **body) -> dict:
    answer = post(url, path, **base | body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def is_dog(text: str) -> bool:
    said = json.loads(text)
    return list(said) == ["name", "age"] and said["age"] in (3, 4) and said["name"].istitle()


@pytest.mark.parametrize("sent", [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}])
def test_a_completion_and_a_chat_fit_a_schema(url, sent):
    completion = post(url, "/v1/completions", **PROMPT | sent).json()["choices"][0]
    assert is_dog(completion["text"])
    assert completion["finish_reason"] == "stop"
    chat = post(url, "/v1/chat/completions", **CHAT | sent, n=2).json()["choices"]
    assert all(is_dog(choice["message"]["content"]) for choice in chat)


def test_vllms_constraints_hold(url):
    for sent, fitting in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{3}"}, ("aaa",)),
        ({"grammar": 'start: "x" "y"'}, ("xy",)),
    ):
        text = post(url, "/v1/completions", **PROMPT, structured_outputs=sent).json()["choices"][0]["text"]
        assert text in fitting


def test_text_asks_for_nothing(url):
    free = post(url, "/v1/completions", **PROMPT).json()["choices"]
    for sent in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
    ):
        assert post(url, "/v1/completions", **PROMPT | sent).json()["choices"] == free


def test_a_json_object_begins_and_is_no_array(url):
    choice = post(url, "/v1/completions", **PROMPT, response_format={"type": "json_object"}).json()[
        "choices"
    ][0]
    assert choice["text"].startswith("{")


def test_openais_client_parses_a_pydantic_model_whole_and_as_a_stream(url):
    with openai_client(url) as client:
        parsed = client.chat.completions.parse(model="m", response_format=Dog, **CHAT)
        assert isinstance(parsed.choices[0].message.parsed, Dog)
        whole = client.chat.completions.create(model="m", response_format=FORMAT, **CHAT)
        stream = client.chat.completions.create(model="m", response_format=FORMAT, stream=True, **CHAT)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert sum(map(bool, pieces)) > 1, "it came in pieces"


def test_a_response_has_the_format_under_text(url):
    sent = {"type": "json_schema"} | FORMAT["json_schema"]
    body = {"input": "Tell me about a dog", "max_output_tokens": 80, "text": {"format": sent}}
    answer = post(url, "/v1/responses", **body).json()
    assert is_dog(answer["output"][0]["content"][0]["text"])
    assert answer["text"]["format"] == sent


DEEP = "{" + '"items":{' * 200 + "}" * 201
REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is required"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "needs type"),
    ({"response_format": {"type": "xml"}}, "'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "pattern"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        'response_format: Unimplemented keys: ["not"] at #/not',
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["x" * 70000]}},
            }
        },
        "at most 65536 are accepted",
    ),
    ({"structured_outputs": {}}, "exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "given are: regex and choice"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx is not a field"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex: "),
    ({"structured_outputs": {"choice": []}}, "at least 1 item"),
    ({"structured_outputs": {"structural_tag": "x"}}, "is not supported"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ({"use_beam_search": True}, "is not supported: beam search takes a whole engine"),
    ({"use_beam_search": True, "n": 2, "response_format": FORMAT}, "LLM.beam_search of Extension B"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "one is accepted"),
]


@pytest.mark.parametrize(("sent", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_refused_is_a_400_that_names_the_field_as_it_was_sent(url, sent, says):
    error = refused(url, **sent)
    assert says in error["message"]
    assert error["param"] == next(iter(sent))


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"type": "json_schema", "name": "a"}, "text.format.schema is required"),
        ({"type": "text", "name": "a"}, "text.format.name needs type"),
        ({"type": "json_schema", "name": "a", "schema": {"not": {}}}, "at #/not"),
    ],
)
def test_a_wrong_format_of_a_response_is_named_text(url, sent, says):
    error = refused(url, "/v1/responses", {"input": "a"}, text={"format": sent})
    assert error["param"] == "text"
    assert says in error["message"]
