"""The load generator's client under servers that answer oddly: a record each, and figures in the end."""

import asyncio

import httpx
import pytest

from engine.client.untrusted import ByteLimit
from engine.load import client as load_client
from engine.load.client import BROKEN, GARBLED, OK, Endpoint, RequestRecord
from engine.load.plan import Job
from engine.load.report import run_figures
from engine.load.run import first_model
from tests.part15.instant import Script, event, run

END = event({"choices": [{"text": "a", "finish_reason": "stop"}]}) + event("[DONE]")


def asked(answer: httpx.Response):
    """(what was seen of it, the figures)"""

    async def tell(i, body):
        return answer

    async def go():
        async with httpx.AsyncClient(base_url="http://script/v1", transport=Script(tell)) as http:
            return await Endpoint(http, "script").ask(Job(0, "prompt", 5), 0.0)

    seen = run(go())
    return seen, run_figures([seen], 0.0, [])


@pytest.mark.parametrize(
    "content",
    [
        b"data: " + b"[" * 100_000 + b"\n\n",
        event({"usage": {"prompt_tokens": "x", "completion_tokens": "y"}}) + END,
        event({"usage": {"prompt_tokens": 1, "completion_tokens": 10**400}}) + END,
        event({"usage": {"prompt_tokens": -1, "completion_tokens": 1}}) + END,
        event({"usage": {"prompt_tokens": 1, "completion_tokens": True}}) + END,
        event({"choices": 5}),
    ],
    ids=["deep", "words", "too many", "fewer than none", "no number", "no choices"],
)
def test_what_is_no_openai_stream_is_counted_as_such(content):
    seen, found = asked(httpx.Response(200, content=content))
    assert seen.outcome == GARBLED
    assert found["failed"] == {GARBLED: 1}


def test_usage_may_say_half():
    usage = event({"usage": {"prompt_tokens": None, "completion_tokens": 2}})
    seen, found = asked(httpx.Response(200, content=usage + END))
    assert (seen.outcome, found["prompt_tokens"], found["output_tokens"]) == (OK, 0, 2)


@pytest.mark.parametrize("value", ["-5", "nan", "1e400", "-inf", "Wed, 21 Oct 2015 07:28:00 GMT", "\xff"])
def test_a_retry_after_that_is_no_time_to_wait_is_none(value):
    headers = {"retry-after": value.encode("latin-1")}
    seen, found = asked(httpx.Response(429, headers=headers))
    assert (seen.outcome, seen.retry_after) == ("429", None)
    assert found["refusals_with_retry_after"] == 0


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [("1500", 1.5), ("soon", 3.0), ("-1", 3.0), ("nan", 3.0), ("0", 0.0)]
)
def test_milliseconds_are_obeyed_before_seconds_as_openais_client_does(milliseconds, seconds):
    seen, found = asked(httpx.Response(429, headers={"retry-after": "3", "retry-after-ms": milliseconds}))
    assert seen.retry_after == seconds
    assert found["refusals_with_retry_after"] == 1


class Endless(httpx.AsyncByteStream):
    async def __aiter__(self):
        for _ in range(1000):
            yield b"data: x"
        pytest.fail("nothing ends an answer without end")


@pytest.mark.parametrize(("status", "outcome"), [(200, GARBLED), (500, "500")])
def test_an_answer_without_end_is_read_up_to_a_bound(monkeypatch, status, outcome):
    monkeypatch.setattr(load_client, "ByteLimit", lambda: ByteLimit(500))
    assert asked(httpx.Response(status, stream=Endless()))[0].outcome == outcome


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b'"x"',
        b'{"data": [{"id": "\\ud800"}]}',
        b'{"data": 5}',
        b'{"data": [{"id": 5}]}',
        b"[" * 100_000,
        b"<html>",
        b" " * 1000,
    ],
)
def test_a_server_that_does_not_say_its_models_is_told_of(monkeypatch, content):
    monkeypatch.setattr("engine.load.run.ByteLimit", lambda: ByteLimit(500 if content[:1] == b" " else 10**6))

    async def go():
        answer = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
        async with httpx.AsyncClient(base_url="http://script/v1", transport=answer) as http:
            return await first_model(http)

    with pytest.raises(ValueError, match=r"which models|deeply|longer|Expecting|surrogates"):
        asyncio.run(go())


@pytest.mark.parametrize("choice", [{"text": 5}, {"delta": {"content": ["a"]}}, {"finish_reason": []}])
def test_text_and_reasons_of_other_types_are_no_openai_stream(choice):
    assert asked(httpx.Response(200, content=event({"choices": [choice]}) + END))[0].outcome == GARBLED


@pytest.mark.parametrize("where", ["body", "parse"])
def test_a_fault_of_ours_is_not_blamed_on_the_server(monkeypatch, where):
    def faulty(self, *_):
        raise TypeError("ours")

    monkeypatch.setattr(*{"body": (Endpoint, "body"), "parse": (RequestRecord, "note_text")}[where], faulty)
    with pytest.raises(TypeError, match="ours"):
        asked(httpx.Response(200, content=END))


def test_a_last_line_without_its_end_is_dropped():
    seen, _ = asked(httpx.Response(200, content=END.removesuffix(b"\n\n")))
    assert seen.outcome == BROKEN, "its [DONE] may be half of something else"
