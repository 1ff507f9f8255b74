"""The end of the server: who is here, who comes, and who is not done in time."""

import asyncio
import json

import pytest

from engine.server.app import create_app
from engine.server.errors import RequestError
from engine.server.run import Server, config
from engine.server.shutdown import LAST_EVENT_SECONDS, POLL_SECONDS, DrainingServer
from tests.part04.serving import DEADLINE, http, wait_until
from tests.part15 import instant
from tests.part15.fakes import admission
from tests.part15.test_over_http import ASK, TEXT

STREAM = ASK | {"stream": True}


def chunks(lines) -> list[dict]:
    """The rest of a stream, to its mark."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]", "a stream ends with [DONE], whatever happened"
    return [json.loads(one) for one in data[:-1]]


def first_words(lines) -> str:
    """Those of the first event that has any."""
    for line in lines:
        if line and (text := json.loads(line.removeprefix("data: "))["choices"][0]["text"]):
            return text
    raise AssertionError("the stream has ended")


@pytest.mark.parametrize(
    ("here", "happens", "at"), [(0, None, 0), (1, "leaves", 3), (1, "Ctrl-C again", 3), (1, None, 10)]
)
def test_how_long_the_door_stays_open(here, happens, at, monkeypatch):
    """On a clock that jumps: somebody is here or not, and something happens at second 3 of 10."""
    backend, closed = admission(), []

    async def close(self, sockets=None):
        closed.append((asyncio.get_running_loop().time(), backend.has_ended_all))

    monkeypatch.setattr(Server, "shutdown", close)

    async def drain():
        server = DrainingServer(config(create_app(backend), "127.0.0.1", 0), backend, shutdown_timeout=10)
        assert server.config.timeout_graceful_shutdown == LAST_EVENT_SECONDS, "to read what one is told"
        backend.capacity.take(here, 10 * here)
        draining = asyncio.create_task(server.shutdown())
        await asyncio.sleep(3)
        if not draining.done():
            with pytest.raises(RequestError) as refused:
                backend.health()
            assert refused.value.headers["Retry-After"] in ("7", "8"), "when the server will be gone"
        if happens == "leaves":
            backend.capacity.give_back(here, 10 * here)
        server.force_exit = happens == "Ctrl-C again"
        await draining

    instant.run(drain())
    ((when, everybody_told),) = closed
    latest = at + 2 * POLL_SECONDS
    assert at <= when <= latest, "until all are done, or their time is over, or Ctrl-C comes again"
    assert everybody_told, "whoever is still here is told before connections are closed"


def test_running_answers_finish_and_new_requests_are_refused_in_words(serving, gate):
    server, url, backend = serving()
    gate.allow(2)
    with http(url) as client, client.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = answer.iter_lines()
        text = first_words(lines)
        server.should_exit = True  # what SIGTERM does
        wait_until(lambda: backend._closes_at is not None)
        for refused in (client.post("/v1/completions", json=ASK), client.get("/health")):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down", (
                "refused in words, not by a closed door"
            )
            assert refused.headers["connection"] == "close"
            assert 1 <= int(refused.headers["retry-after"]) <= DEADLINE
        gate.open()
        rest = chunks(lines)
    assert text + "".join(one["choices"][0]["text"] for one in rest) == TEXT, "the running answer is whole"
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert backend.refused["shutting_down"] == 1


def test_who_is_not_done_in_time_is_told(serving, gate):
    """One runs, one waits behind it: the engine takes one at a time."""
    server, url, backend = serving(shutdown_timeout=0)
    gate.allow(2)
    with http(url) as client, client.stream("POST", "/v1/completions", json=STREAM) as running:
        lines = running.iter_lines()
        text = first_words(lines)
        with client.stream("POST", "/v1/completions", json=STREAM) as queued:
            wait_until(lambda: backend.capacity.sequences == 2)
            server.should_exit = True
            rest, told = chunks(lines), chunks(queued.iter_lines())
            gate.open()
    text += "".join(one["choices"][0]["text"] for one in rest)
    assert TEXT.startswith(text), "what it has said stands"
    assert rest[-1]["choices"][0]["finish_reason"] == "abort", (
        "its last event says that it did not end by itself"
    )
    assert [one["error"]["code"] for one in told] == ["shutting_down"], "who has no word yet is told why"


def test_a_second_interrupt_waits_for_nobody(serving, gate):
    server, url, backend = serving(shutdown_timeout=10 * DEADLINE)
    gate.allow(2)
    with http(url) as client, client.stream("POST", "/v1/completions", json=STREAM) as running:
        first_words(running.iter_lines())
        server.should_exit = True
        wait_until(lambda: backend._closes_at is not None)
        server.force_exit = True
        wait_until(lambda: backend.idle)
        gate.open()


@pytest.mark.parametrize("seconds", [0, 10])
def test_at_the_deadline_the_door_closes_and_not_a_look_later(seconds, monkeypatch):
    """On a clock that jumps, which the looks meet exactly: a quarter of a second has no rounding."""
    backend, closed = admission(), []

    async def close(self, sockets=None):
        closed.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(Server, "shutdown", close)
    monkeypatch.setattr("engine.server.shutdown.POLL_SECONDS", 0.25)

    async def drain():
        server = DrainingServer(config(create_app(backend), "127.0.0.1", 0), backend, seconds)
        backend.capacity.take(1, 10)
        await server.shutdown()

    instant.run(drain())
    assert closed == [seconds], "at the deadline its time is over, not after it"
