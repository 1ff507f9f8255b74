"""Clients that know HTTP and mean harm by it: bodies in crumbs, nonsense behind a request, upgrades, bodies
that come at once. `/health` answers without reading what is sent.
"""

import asyncio
import json
import logging
import socket
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

import pytest
from fastapi import Request

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server import completion_answer
from engine.server.app import create_app
from engine.server.limits import LARGE_BODY_BYTES, MAX_BYTES_AHEAD, MAX_CHUNKS
from engine.server.middleware import LOOP_TURNS, BodyLimit
from engine.server.protocol import CompletionRequest, Completions
from tests.part04.serving import DEADLINE, ScriptedBackend, serve, wait_until

HOST = b"host: localhost\r\n"
CHUNKED = b" /health HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n"
ASK = {"model": "script", "prompt": "go"}
BEGUN = RequestOutput("r", "go", [7], [], finished=False)


@pytest.fixture
def url():
    """A server's; nothing that is sent there may be an error of its own."""
    errors = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = errors.append
    loggers = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error")]
    with ExitStack() as stack:
        url = stack.enter_context(serve(create_app(ScriptedBackend())))
        for logger in loggers:
            stack.callback(logger.setLevel, logger.level)
            stack.callback(logger.removeHandler, handler)
            logger.setLevel(logging.ERROR)
            logger.addHandler(handler)
        yield url
    assert not errors, "what a client sends makes a traceback in the server's log"


def answer(url: str, *sent: bytes) -> bytes:
    """What comes until the server closes; of `sent`, the second is sent when something has come."""
    came = b""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=DEADLINE) as there:
        for piece in sent:
            with suppress(ConnectionError):
                there.sendall(piece)
            with suppress(ConnectionError):
                came += there.recv(2**16)
        with suppress(ConnectionError):
            while piece := there.recv(2**16):
                came += piece
    return came


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_body_has_only_so_many_chunks(url, method):
    """A megabyte in chunks of one byte took 8 s of processor time, in which nobody else had a turn."""
    head = method + CHUNKED
    few = answer(url, head + b"connection: close\r\n\r\n" + b"1\r\na\r\n" * MAX_CHUNKS + b"0\r\n\r\n")
    assert few.startswith(b"HTTP/1.1 " + (b"200" if method == b"GET" else b"405")), "so many are accepted"
    got = answer(url, head + b"\r\n", b"1\r\na\r\n" * (MAX_CHUNKS + 1) + b"0\r\n\r\n")
    assert got.count(b"HTTP/1.1") == 1, "the connection of who sends too many chunks is closed"


@pytest.mark.parametrize(
    "sent",
    [
        (b"GET" + CHUNKED + b"\r\n", b"zz\r\n"),  # the answer has been sent
        (b"GET" + CHUNKED + b"connection: close\r\n\r\n", b"zz\r\n"),
        (b"GET" + CHUNKED + b"\r\n" + b"zz\r\n",),  # somebody is at the answer
        (b"POST" + CHUNKED + b"\r\n" + b"0\r\n\x00\r\n\r\n",),
        (b"GET" + CHUNKED + b"\r\n" + b"0\r\n\r\n" + b"\x00\r\n\r\n",),
    ],
    ids=["behind the answer", "behind the last answer", "with the request", "a trailer", "the next request"],
)
def test_what_is_no_http_closes_the_connection_and_is_no_error_of_the_server(url, sent):
    """It was answered a second time: two tracebacks for each."""
    got = answer(url, *sent)
    assert got.startswith(b"HTTP/1.1 ")
    assert got.count(b"HTTP/1.1 400") <= 1
    assert answer(url, b"GET /health HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n")


BOTH = b"content-length: 5\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400, "multiple Host"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 100_000, 431, "too long"),
        (b"what is this\r\n\r\n", 400, "request line"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"content-length: -1\r\n\r\n", 400, "Content-Length"),
        (b"POST /v1/completions HTTP/1.1\r\n" + HOST + BOTH + b"\r\n{}", 400, "two lengths"),
    ],
    ids=["no host", "two hosts", "a huge header", "no request", "a negative length", "two lengths"],
)
def test_what_is_no_http_gets_an_error_in_our_shape_and_at_once(url, sent, status, says):
    """It was uvicorn's plain text; and nothing at all for two lengths, while the body was waited for."""
    head, _, body = answer(url, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_a_head_that_is_no_http_has_no_body_and_no_traceback(url):
    got = answer(url, b"HEAD /health HTTP/1.1\r\n" + HOST + BOTH + b"\r\n")
    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.endswith(b"\r\n\r\n")


def test_who_asks_for_a_websocket_is_answered_in_http(url):
    wish = b"connection: close, upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    got = answer(url, b"GET /health HTTP/1.1\r\n" + HOST + wish + key)
    assert got.startswith(b"HTTP/1.1 200"), "no route speaks it: the wish changes nothing"


def test_requests_that_come_ahead_are_answered_one_after_the_other(url):
    ask = b"GET /health HTTP/1.1\r\n" + HOST
    assert answer(url, (ask + b"\r\n") * 20 + ask + b"connection: close\r\n\r\n").count(b'"ok"') == 21


def test_between_two_large_bodies_others_have_their_turn():
    """Thirty bodies of a megabyte that came at once kept everybody waiting until the last had been read."""
    rounds, read = 0, []

    async def receive():
        return {"type": "http.request", "body": b" " * (LARGE_BODY_BYTES + 1), "more_body": False}

    async def app(scope, receive, send):
        await receive()
        read.append(rounds)

    async def run():
        nonlocal rounds
        gate = BodyLimit(app, 2**20)
        asked = [asyncio.create_task(gate({"type": "http"}, receive, None)) for _ in range(5)]
        while not all(task.done() for task in asked):
            rounds += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert len(read) == 5
    between = [later - earlier for earlier, later in pairwise(read)]
    assert min(between) >= LOOP_TURNS, f"rounds of the event loop between two bodies: {between}"


@pytest.mark.parametrize(("seconds", "least"), [(-1.0, LOOP_TURNS), (DEADLINE, 0)])
def test_between_long_pieces_of_a_stream_others_have_their_turn(monkeypatch, seconds, least):
    """An echo with log probabilities, n=128 times, as a stream: others waited for seconds."""
    monkeypatch.setattr(completion_answer, "TURN_SECONDS", seconds)
    rounds, came = 0, []

    async def outputs():
        samples = [CompletionOutput(i, "a", [1], "length") for i in range(4)]
        yield RequestOutput("r", "go", [7], samples, finished=True)

    async def count():
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def run():
        counting = asyncio.create_task(count())
        body = CompletionRequest(**ASK, n=4, stream=True)
        async for _ in completion_answer.stream_chunks({}, [outputs()], [BEGUN], 4, body, Completions()):
            came.append(rounds)
        counting.cancel()

    asyncio.run(run())
    between = [later - earlier for earlier, later in pairwise(came)]
    assert len(between) == 3
    assert min(between) >= least
    assert least or max(between) == 0, "pieces that are short cost no turns"


@contextmanager
def waiting():
    """(a backend that has one open for who is being answered, that client's connection)"""
    backend = ScriptedBackend()

    def wait(app, _) -> None:
        @app.get("/wait")
        async def wait(request: Request) -> None:
            """Until the client has left."""
            backend.open += 1
            while (await request.receive())["type"] != "http.disconnect":
                pass
            backend.open -= 1

    with serve(create_app(backend, extensions=[wait])) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as there:
            there.sendall(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
            wait_until(lambda: backend.open)
            yield backend, there


def test_who_leaves_after_sending_a_byte_ahead_is_missed():
    """The answer under way was made to its end: uvicorn had stopped reading."""
    with waiting() as (backend, there):
        for byte in (b"G", b"E"):
            there.sendall(byte)
        there.close()
        wait_until(lambda: not backend.open)


def test_who_sends_far_ahead_is_cut_off():
    with waiting() as (backend, there):
        with suppress(ConnectionError):
            there.sendall(b"G" * 2 * MAX_BYTES_AHEAD)
        wait_until(lambda: not backend.open)
