"""Admission control as clients meet it: OpenAI's client, deadlines in a header, and clients that leave."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest
from httpx import ASGITransport, AsyncClient

from engine.decoding.params import SamplingParams
from engine.server.app import create_app
from tests.part04.serving import DEADLINE, http
from tests.part06.fakes import told_alone
from tests.part15.fakes import PARAMS, Clock, admission, output, run, turns

ASK = {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = told_alone("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).text
PLAIN = {name: value for name, value in ASK.items() if name != "ignore_eos"}


def events(answer) -> list[dict]:
    """What a stream said; its mark of the end must be there."""
    data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert data[-1] == "[DONE]", "a stream ends with [DONE], whatever happened"
    return [json.loads(one) for one in data[:-1]]


def test_openais_client_comes_again_when_it_is_told_to(serving, gate, until, monkeypatch):
    """Its sleep is the test's: it sees for how long, and lets the engine finish meanwhile."""
    clock, slept = Clock(), []
    _, url, backend = serving(reqs=2, clock=clock)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=1, timeout=DEADLINE)

    def ask() -> str:
        return client.completions.create(**PLAIN, extra_body={"ignore_eos": True}).choices[0].text

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        gate.open()
        until(lambda: backend.idle)

    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    with client, ThreadPoolExecutor(2) as pool:
        # 1. One runs and one waits; three seconds later, a third finds no room, and comes again.
        others = [pool.submit(ask) for _ in range(2)]
        until(lambda: backend.capacity.sequences == 2)
        clock.now += 3.25
        assert ask() == TEXT, "the client asked again, and was served"
        # 2. The others lost nothing by it.
        assert [other.result(DEADLINE) for other in others] == [TEXT, TEXT]
    assert slept == [3.25], "retry-after-ms: whoever runs has taken 3.25 seconds by now, and one must leave"
    assert backend.refused["queue_full"] == 1


def test_a_refusal_has_openais_shape(serving, gate):
    _, url, _ = serving(reqs=2)
    with http(url) as client:
        answer = client.post("/v1/completions", json=ASK | {"n": 3})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "this request comes to 3 sequences: the whole queue has room for 2",
            "type": "invalid_request_error", "param": "n", "code": "request_too_large",
        }  # fmt: skip
        assert answer.headers["x-request-id"]


def test_prompts_that_find_no_room_leave_none_behind(serving, gate):
    _, url, backend = serving(reqs=2)
    with http(url) as client:
        answer = client.post("/v1/completions", json=ASK | {"prompt": ["a", "b", "c"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
        assert backend.idle, "all prompts are admitted or none"
        assert gate.entered == 0, "none was begun"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_in_the_queue(serving, gate, until, stream):
    """No step is allowed, so there is never a token."""
    _, url, backend = serving()
    with http(url) as client:
        headers = {"X-Request-Timeout": "0.05"}
        answer = client.post("/v1/completions", json=ASK | {"stream": stream}, headers=headers)
        error = events(answer)[-1]["error"] if stream else answer.json()["error"]
        assert answer.status_code == (200 if stream else 503), "a stream's status has been sent already"
        assert error["code"] == "queue_timeout", "a stream that has begun gets the error as an event"
        assert ("retry-after" in answer.headers) == (not stream)
        until(lambda: backend.idle)


def test_the_operators_deadline(serving, gate):
    _, url, _ = serving(request_timeout=0.05)
    with http(url) as client:
        answer = client.post("/v1/completions", json=ASK, headers={"X-Request-Timeout": "1000"})
        assert answer.json()["error"]["code"] == "queue_timeout", "the operator's bound is the sooner one"


@pytest.mark.parametrize("given", [["soon"], ["0"], ["1", "1000"]])
def test_a_deadline_that_is_none(serving, given):
    _, url, _ = serving()
    with http(url) as client:
        headers = [("X-Request-Timeout", one) for one in given]
        answer = client.post("/v1/completions", json=ASK, headers=headers)
        assert answer.status_code == 400, "a header that is said twice is no number of seconds either"
        assert answer.json()["error"]["param"] == "X-Request-Timeout"
        assert ", ".join(given) in answer.json()["error"]["message"]


def test_the_description_of_the_api_has_the_header(serving):
    _, url, _ = serving()
    with http(url) as client:
        for _ in range(2):  # the second is the one that was kept
            paths = client.get("/openapi.json").json()["paths"]
            found = [one["name"] for one in paths["/v1/completions"]["post"]["parameters"]]
            assert found == ["X-Request-Timeout"]
            assert "parameters" not in paths["/v1/models"]["get"], "it does nothing there"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("goes", ["closes", "closes its half", "resets"])
def test_a_client_that_leaves_the_queue_gives_its_place_back_at_once(serving, gate, until, stream, goes):
    """The engine stands still meanwhile: its next step is not waited for."""
    _, url, backend = serving()
    body = json.dumps(ASK | {"stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=DEADLINE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: gate.entered == 1)
        assert not backend.idle
        if goes == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if goes == "closes its half":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        until(lambda: backend.idle)
    assert gate.entered == 1, "nobody waited for the engine"


@pytest.mark.parametrize("few", ["xyz", "xy"])
def test_two_requests_of_several_prompts_do_not_refuse_each_other(few):
    """Three places are free. One asks for four, the other for three or two: the other has its own."""

    async def test():
        backend = admission(reqs=4)
        desk = backend.backend
        held_already = await backend.generate("prompt", PARAMS, "r")
        desk.looking = asyncio.Event()
        transport = ASGITransport(create_app(backend))
        async with AsyncClient(transport=transport, base_url="http://here", timeout=DEADLINE) as client:

            def ask(prompts: str) -> asyncio.Task:
                body = {"model": "desk", "prompt": list(prompts), "temperature": 0}
                return asyncio.create_task(client.post("/v1/completions", json=body))

            four, other = ask("abcd"), ask(few)
            await turns(other)  # what can be looked at side by side is
            desk.looking.set()
            assert (await four).json()["error"]["code"] == "queue_full", "there are three places, not four"
            while len(open_feeds := [feed for feed in desk.feeds[1:] if not feed.closed]) < len(few):
                assert not other.done(), "it was refused for places of a request that was refused itself"
                await asyncio.sleep(0)
            for feed in open_feeds:
                feed.say(output(("yes", "stop")))
            assert len((await other).json()["choices"]) == len(few)
        await held_already.aclose()
        assert backend.idle

    run(test())
