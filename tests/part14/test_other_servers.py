"""What a client makes of answers that our own server never gives. No port is opened."""

import json
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from engine.client import stream
from engine.client.stream import ChatClient, ChatFailed

HI = [{"role": "user", "content": "Hi"}]


def client_of(answer, model="m") -> ChatClient:
    """A client for a server that answers every request with answer(request)."""
    client = ChatClient("http://there", model=model)
    client._http = httpx.Client(base_url="http://there/v1", transport=httpx.MockTransport(answer))
    return client


def told(*events: dict) -> httpx.Response:
    """A stream of these chunks."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body.encode())


def chunk(content: str | None, reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}]}


def test_a_server_without_a_model_is_told_of():
    client = client_of(lambda request: httpx.Response(200, json={"data": []}), model=None)
    with pytest.raises(ChatFailed, match="has no model"):
        client.model  # noqa: B018


def test_a_server_that_is_silent_for_too_long_is_told_of():
    def silent(request):
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(ChatFailed, match="http://there/v1/ did not answer in time"):
        list(client_of(silent).stream(HI))


def test_a_finish_reason_stands_whatever_comes_after_it():
    client = client_of(lambda request: told(chunk("Hi"), chunk("", "length"), chunk(None)))
    *_, (_, answer) = client.stream(HI)
    assert (answer.text, answer.finish_reason) == ("Hi", "length")


def test_the_first_word_came_once(monkeypatch):
    clock = count()
    monkeypatch.setattr(stream, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    client = client_of(lambda request: told(chunk(""), chunk("a"), chunk("b"), chunk("c", "stop")))
    *_, (_, answer) = client.stream(HI)
    assert (answer.first_word, answer.last_word) == (1, 3), "a word is timed when it comes, and once"
