"""`ruvon serve` under clients that mean harm, on Part 14's routes and /v1/responses; two streams run."""

import json
from random import Random
from string import ascii_lowercase as LETTERS

import pytest

from tests.system.attack import JSON
from tests.system.test_hostile_watchers import client, neighbour, server  # noqa: F401

CHAT = {"model": "storyteller", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PROMPT = {"prompt": "a", "max_tokens": 2}
RESPONSE = {"input": "hi", "max_output_tokens": 16}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}


def says(*contents: str, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": content} for content in contents]}


def nested(field: str, depth: int) -> dict:
    """A JSON schema inside a JSON schema, and so on."""
    schema: dict = {}
    for _ in range(depth):
        schema = {field: schema}
    return schema


BODIES = {
    "a long message": ("/v1/chat/completions", CHAT | says("a " * 480_000), 400),
    "many systems, each before all that came": (  # 800 million characters on the way
        "/v1/chat/completions", CHAT | says(*["x" * 400] * 2000, role="system"), 400
    ),
    "too many messages": ("/v1/chat/completions", CHAT | says(*["hi"] * 20_000), 400),
    "nested content": ("/v1/chat/completions", CHAT | {"messages": [[[[]]]]}, 400),
    "half a character": ("/v1/chat/completions", CHAT | says("\ud800"), 400),
    "special tokens": ("/v1/chat/completions", CHAT | says("<|assistant|><|endoftext|>" * 50), 200),
    "a list": ("/v1/chat/completions", [1], 400),
    "numbers without end": ("/v1/chat/completions", CHAT | {"temperature": 1e308, "seed": 10**30}, 400),
    "many answers": ("/v1/chat/completions", CHAT | {"n": 128}, 200),
    "many answers, told of": (
        "/v1/chat/completions", CHAT | {"n": 64, "max_tokens": 20, "logprobs": True, "top_logprobs": 20}, 200
    ),
    "a long prompt": ("/generate", PROMPT | {"prompt": "x" * 900_000}, 400),
    "prompts": ("/generate", PROMPT | {"prompt": ["x"]}, 400),
    "a negative length": ("/generate", PROMPT | {"max_tokens": -1}, 400),
    "a long input": ("/v1/responses", RESPONSE | {"input": "a " * 480_000}, 400),
    "long instructions": ("/v1/responses", RESPONSE | {"instructions": "a " * 480_000}, 400),
    "too many items": ("/v1/responses", RESPONSE | {"input": [ITEM] * 8_000}, 400),
    "calls of nothing, one after the other": ("/v1/responses", RESPONSE | {"input": [CALL] * 8_000}, 400),
    "items of other kinds": ("/v1/responses", RESPONSE | {"input": [{"type": [{}]}] * 50_000}, 400),
    "half an item's character": ("/v1/responses", RESPONSE | {"input": [ITEM | {"content": "\udfff"}]}, 400),
    "special tokens for input": ("/v1/responses", RESPONSE | {"input": "<|assistant|><|user|>" * 50}, 200),
    "numbers without end in a response": ("/v1/responses", RESPONSE | {"max_output_tokens": 10**300}, 400),
    "a schema without end": (
        "/v1/responses",
        RESPONSE | {"text": {"format": {"type": "json_schema", "name": "a", "schema": nested("items", 400)}}},
        400,
    ),
    "a text of a megabyte": ("/tokenize", {"prompt": "word " * 200_000}, 200),
    "a word of 99,000 letters": ("/tokenize", {"prompt": "specially" * 11_000}, 200),
    "a word of a megabyte": ("/tokenize", {"prompt": "".join(Random(0).choices(LETTERS, k=10**6))}, 200),
    "spellings of 200,000 tokens": ("/tokenize", {"prompt": " " * 200_000, "return_token_strs": True}, 200),
    "a conversation of a megabyte": ("/tokenize", says(*["hi " * 160] * 2_000), 200),
    "a prompt and messages": ("/tokenize", says("hi") | {"prompt": "hi"}, 400),
    "prompts to tokenize": ("/tokenize", {"prompt": ["a"] * 200_000}, 400),
    "ids for a megabyte": ("/detokenize", {"tokens": [5] * 300_000}, 200),
    "ids that are none": ("/detokenize", {"tokens": [5] * 300_000 + [10**9]}, 400),
    "ids that are texts": ("/detokenize", {"tokens": ["5"] * 200_000}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_an_odd_body_is_answered_and_pauses_nobody(client, neighbour, name):  # noqa: F811
    path, body, status = BODIES[name]
    content = json.dumps(body).encode()

    answers = set()

    def attack() -> None:
        answers.add(client.post(path, content=content, headers=JSON).status_code)

    assert not neighbour.pauses_for(attack)
    assert answers == {status}
