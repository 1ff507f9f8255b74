"""Tools against `ruvon serve` with a model: calls that are required fit, and no odd tool breaks anything."""

import json
from itertools import product

import httpx
import pytest

from engine.demo.server import served
from tests.part04.serving import http
from tests.partB.saying import ADD, ASK, WEATHER

FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "array"}, {},
    {"properties": {"a": {"$ref": "#"}}}, {"$ref": "file:///etc/passwd"}, {"$ref": "#/nowhere"},
    {"type": []}, {"properties": {"a": {"pattern": "(a*)*b"}}}, {"enum": []}, {"not": {}},
    {"properties": {"a": {"type": "string", "maxLength": 10**9}}}, {"required": ["x"] * 500},
    {"properties": {f"p{i}": {"type": "string"} for i in range(500)}}, {"allOf": [{"type": "object"}] * 200},
    {"properties": {"a": {"pattern": "(?=x)"}}}, {"properties": {"a": {"uniqueItems": True}}},
)  # fmt: skip
NAMED = {"type": "function", "function": {"name": "f"}}
CHOICES = (None, "auto", "none", "required", NAMED, {"type": "function", "function": {"name": "g"}})


@pytest.fixture(scope="module")
def url(tmp_path_factory, forked):
    log = tmp_path_factory.mktemp("tools") / "server.log"
    with served(log, "--model", "storyteller-draft", *FLAGS) as (url, _):
        yield url
    assert "Traceback" not in log.read_text()


def ask(client: httpx.Client, **fields) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 120, "temperature": 0} | fields
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required_fits_whole_and_streamed(url, choice):
    fields = {"tools": [WEATHER, ADD] if choice != "required" else [ADD], "tool_choice": choice}
    with http(url) as client:
        message = ask(client, parallel_tool_calls=False, **fields).json()["choices"][0]["message"]
        lines = ask(client, parallel_tool_calls=False, stream=True, **fields).text.split("\n")
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "add"
    assert set(arguments) == {"a", "b"}
    assert all(type(value) is int and 0 <= value <= 99 for value in arguments.values())
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]


def test_calls_that_are_required_are_a_list_in_which_each_fits(url):
    with http(url) as client:
        answer = ask(client, tools=[ADD], tool_choice="required", n=2, seed=3, temperature=1).json()
    for choice in answer["choices"]:
        calls = choice["message"]["tool_calls"]
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]  # the last was cut off
        for call in whole:
            assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}


def test_odd_tools_are_answered_or_refused_in_the_one_shape(url):
    statuses = []
    with http(url) as client:
        for schema, choice in product(SCHEMAS, CHOICES):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            answer = ask(client, tools=[tool], tool_choice=choice, max_tokens=3)
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400), f"{schema} {choice}: {answer.text}"
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"] in ("tools", "tool_choice"), error
                assert "tools[0].function.parameters" in error["message"] or choice == CHOICES[-1], error
        assert ask(client, max_tokens=3).status_code == 200, "and the server goes on"
    assert statuses.count(200) > len(SCHEMAS), "what asks for nothing odd is answered"
    assert statuses.count(400) > len(SCHEMAS)


def test_a_parser_that_is_none_is_refused_before_a_model_is_loaded(tmp_path, forked):
    for flags, words in (
        (
            ["--tool-call-parser", "mistral"],
            "tool_call_parser='mistral': accepted are hermes, llama3_json, json",
        ),
        (["--reasoning-parser", "x"], "reasoning_parser='x': accepted are qwen3"),
        (["--enable-auto-tool-choice"], "enable_auto_tool_choice=True needs tool_call_parser"),
    ):
        command = served(tmp_path / "log", "--model", "storyteller-draft", *flags)
        with pytest.raises(RuntimeError, match="the server did not start") as caught, command:
            pass
        assert words in " ".join(str(caught.value).split())
