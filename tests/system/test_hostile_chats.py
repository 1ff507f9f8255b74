"""`ruvon serve` under clients that mean harm, on Part 14's routes, while two streams run."""

import json

import pytest

from tests.system.attack import JSON
from tests.system.test_hostile_watchers import client, neighbour, server  # noqa: F401

CHAT = {"model": "storyteller", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PROMPT = {"prompt": "a", "max_tokens": 2}


def says(*contents: str, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": content} for content in contents]}


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
