"""`ruvon serve` under crowds, without the key, and under clients that read nothing or close half of their
connection: /v1/responses, /tokenize and the stream of /engine. A key is set, and two streams run.
"""

import json
import socket
from collections import Counter
from contextlib import ExitStack

import pytest

from engine.server.limits import MAX_WATCHERS
from tests.system.attack import HEAD, wait_until
from tests.system.test_hostile_watchers import (  # noqa: F401
    HOST,
    WATCH,
    Keyed,
    client,
    get,
    neighbour,
    server,
)

CROWD = 200
KEY = b"authorization: Bearer secret"
RESPONSE = {"input": "hi", "max_output_tokens": 16, "temperature": 0}
ENDLESS = {"input": "hi", "max_output_tokens": 900, "stream": True, "temperature": 1}


def post(path: str, body: dict, headers: bytes = KEY) -> bytes:
    content = json.dumps(body).encode()
    head = HEAD.replace(b"/v1/completions", path.encode()).replace(HOST, HOST + headers + b"\r\n")
    return head % len(content) + content


def watching(headers: bytes) -> bytes:
    return get("/engine/events", HOST + headers + b"\r\n")


REQUESTS = {
    "/v1/responses": lambda headers: post("/v1/responses", RESPONSE, headers),
    "/responses": lambda headers: post("/responses", RESPONSE, headers),
    "/tokenize": lambda headers: post("/tokenize", {"prompt": "a"}, headers),
    "/detokenize": lambda headers: post("/detokenize", {"tokens": [5]}, headers),
    "/engine/events": watching,
}
NO_KEYS = (
    b"x: y", b"authorization:", b"authorization: secret", b"authorization: Bearer",
    b"authorization: Bearer  ", b"authorization: Bearer secre", b"authorization: Bearer secret2",
    b"authorization: Bearer SECRET", b"authorization: Basic c2VjcmV0", b"authorization: Bearer secret secret",
    b"authorization: Bearer \xff", b"authorization: Bearer " + b"s" * 10_000,
    b"x-api-key: secret", b"cookie: authorization=Bearer secret",
)  # fmt: skip


@pytest.mark.parametrize("path", REQUESTS)
def test_nobody_is_let_in_without_the_key(server, neighbour, path):  # noqa: F811
    for headers in NO_KEYS:
        assert server.hears(REQUESTS[path](headers)).split(b" ")[1] == b"401", headers[:40]


def crowd(server: Keyed, sent: bytes) -> Counter:  # noqa: F811
    """So many connections send at once. How many answers begin with which status? Then all leave."""
    with ExitStack() as stack:
        there = [stack.enter_context(server.connect()) for _ in range(CROWD)]
        for connection in there:
            connection.sendall(sent)
        return Counter(connection.recv(12).split(b" ")[1] for connection in there)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_crowd_that_counts_tokens_is_answered(server, neighbour, path):  # noqa: F811
    assert crowd(server, REQUESTS[path](KEY)) == {b"200": CROWD}


def test_a_crowd_that_asks_is_answered_or_told_to_wait(server, client):  # noqa: F811
    statuses = crowd(server, REQUESTS["/v1/responses"](KEY))
    assert statuses.keys() <= {b"200", b"429"}
    assert statuses[b"200"] >= 16, "there are so many seats, and room to wait"
    assert client.post("/v1/responses", json=RESPONSE).status_code == 200


def lets_in(server: Keyed) -> bool:  # noqa: F811
    return server.hears(WATCH).split(b" ")[1] == b"200"


def test_a_crowd_that_watches_has_eight_who_do_and_leaves_no_seat_taken(server, neighbour):  # noqa: F811
    wait_until(lambda: crowd(server, WATCH) == {b"200": MAX_WATCHERS, b"429": CROWD - MAX_WATCHERS})
    wait_until(lambda: lets_in(server))


@pytest.mark.parametrize("goes", ["closes half", "reads nothing"])
def test_who_watches_and_looks_away_gives_the_seat_back(server, neighbour, goes):  # noqa: F811
    """This server cuts off who reads nothing for 3 s, once what lies between the two is full."""
    with ExitStack() as stack:
        watchers = []
        while len(watchers) < MAX_WATCHERS:  # those of another test may still be leaving
            connection = stack.enter_context(server.connect())
            connection.sendall(WATCH)
            if connection.recv(12).endswith(b"200"):
                watchers.append(connection)
        for connection in watchers if goes == "closes half" else ():
            connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: lets_in(server))


@pytest.mark.parametrize("goes", ["closes half", "resets", "sends more"])
def test_who_leaves_a_response_leaves_nothing_running(server, client, goes):  # noqa: F811
    with ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(server.connect())
            connection.sendall(post("/v1/responses", ENDLESS))
            connection.recv(100)
            if goes == "closes half":
                connection.shutdown(socket.SHUT_WR)
            elif goes == "resets":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
            else:
                connection.sendall(b"x" * 2**19)  # no next request is as large

        def only_neighbours() -> bool:
            now = client.get("/dashboard/data").json()["now"]
            return now["running"] + now["waiting"] <= 2

        wait_until(only_neighbours)
