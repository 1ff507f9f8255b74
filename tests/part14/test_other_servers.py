"""What a client makes of answers that our own server never gives. No port is opened."""

import json
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from engine.client import stream
from engine.client.stream import ChatClient, ChatFailed
from engine.client.untrusted import ByteLimit, printable

HI = [{"role": "user", "content": "Hi"}]
SSE = {"content-type": "text/event-stream"}


def client_of(answer, model="m") -> ChatClient:
    """A client for a server that answers every request with answer(request)."""
    client = ChatClient("http://there", model=model)
    client._http = httpx.Client(base_url="http://there/v1", transport=httpx.MockTransport(answer))
    return client


def told(*events: dict) -> httpx.Response:
    """A stream of these chunks."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return httpx.Response(200, headers=SSE, content=body.encode())


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
    assert (answer.first_text_seconds, answer.last_text_seconds) == (1, 3), (
        "a word is timed when it comes, and once"
    )


def failed(answer, model="m") -> str:
    """What is said of this answer, model and stream asked for."""
    client = client_of(lambda request: answer, model)
    with pytest.raises(ChatFailed) as caught:
        list(client.stream(HI))
    return str(caught.value)


def models(content: bytes | str) -> httpx.Response:
    return httpx.Response(200, content=content)


@pytest.mark.parametrize(
    ("answer", "model"),
    [
        (models("[" * 100_000), None),
        (models('{"data": 5}'), None),
        (models('{"data": [{"id": 5}]}'), None),
        (told(chunk(5)), "m"),
        (told(chunk("a"), {"usage": {"completion_tokens": "many"}}), "m"),
        (told(chunk("a"), {"usage": {"completion_tokens": 10**400}}), "m"),
        (told(chunk("a"), {"usage": {"completion_tokens": -1}}), "m"),
        (told(chunk("a"), {"usage": {"prompt_tokens": 1.5}}), "m"),
        (httpx.Response(200, headers=SSE, content="data: " + "[" * 100_000 + "\n\n"), "m"),
    ],
    ids=[
        "deep",
        "no list",
        "no name",
        "no text",
        "words",
        "too many",
        "fewer than none",
        "half",
        "deep event",
    ],
)
def test_what_has_another_shape_is_told_in_one_sentence(answer, model):
    assert "does not speak OpenAI's chat API" in failed(answer, model)


def test_half_a_character_is_a_mark():
    """JSON may say it, and nothing that is written can hold it."""
    client = client_of(lambda request: told(chunk("a\ud83d"), chunk("\ude00\U0001f600", "stop")))
    *_, (_, answer) = client.stream(HI)
    assert answer.text == "a\ufffd\ufffd\U0001f600"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(400, json={"error": {"message": "no \x1b]0;x\x07" * 1000}}),
        httpx.Response(200, headers={"content-type": "text/\x1b[2J"}),
        httpx.Response(500, content=b"\x1b[2J", extensions={"reason_phrase": b"\x1b[2J"}),
        httpx.Response(400, content="[" * 100_000),
        told({"error": {"message": "\x9b2J\ud800"}}),
    ],
    ids=["an error", "a type", "a reason", "depth", "an event"],
)
def test_an_error_commands_no_terminal_and_is_no_book(answer):
    said = failed(answer)
    assert printable(said) == said
    assert len(said) <= stream.MAX_MESSAGE_CHARACTERS


class Endless(httpx.SyncByteStream):
    def __init__(self, piece: bytes) -> None:
        self.piece = piece

    def __iter__(self):
        for _ in range(1000):
            yield self.piece
        pytest.fail("nothing ends an answer without end")


@pytest.mark.parametrize(
    ("status", "piece"), [(200, b"x"), (200, b"data: x\n"), (200, b": x\n\n"), (500, b" "), (None, b" ")]
)
def test_an_answer_without_end_is_read_up_to_a_bound(monkeypatch, status, piece):
    monkeypatch.setattr(stream, "ByteLimit", lambda: ByteLimit(500))
    failed(httpx.Response(status or 200, headers=SSE, stream=Endless(piece)), None if status is None else "m")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": {}}, "{'error': {}}"),
        ({"error": {"message": None}}, "{'error': {'message': None}}"),
        ({"error": "x"}, "x"),
        ({"error": 7}, "{'error': 7}"),
        (["x"], "['x']"),
    ],
)
def test_an_error_without_a_message_is_told_whole(body, said):
    assert failed(httpx.Response(400, json=body)) == said
