"""`ruvon serve` under clients that mean harm, on the routes of Parts 10 and 11: /metrics, /dashboard, echo
and log probabilities. A key is set, and two streams run all the while. Bounded in time and count.
"""

import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from engine.server.limits import MAX_WATCHERS
from tests.system.attack import (
    ASK,
    DEADLINE,
    HEAD,
    JSON,
    Neighbour,
    Process,
    assert_closed,
    wait_until,
)

KEY = {"authorization": "Bearer secret"}
HOST = b"host: localhost\r\n"
WATCHED = (
    "/metrics", "/dashboard", "/dashboard/data", "/dashboard/dashboard.js", "/engine",
    "/docs", "/openapi.json",
)  # fmt: skip
LONG = "word " * 400


class Keyed(Process):
    """A server with a key, and clients that have it."""

    def client(self) -> httpx.Client:
        client = super().client()
        client.headers.update(KEY)
        return client

    def holds(self) -> float:
        """Memory held now, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def hears(self, sent: bytes) -> bytes:
        """What comes back first, at most 200 bytes; nothing, if the connection is closed."""
        with self.connect() as connection:
            connection.sendall(sent)
            with suppress(ConnectionResetError):
                return connection.recv(200)
            return b""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Keyed]:
    """In the end it serves as if nothing had been, and has failed at nothing."""
    server = Keyed(
        tmp_path_factory.mktemp("server"), "REQUEST_SECONDS=5,STALL_SECONDS=3", "--model", "storyteller",
        "--max-num-seqs", "16", "--api-key", "secret",
    )  # fmt: skip
    try:
        with server.client() as client:
            before = client.post("/v1/completions", json=ASK).json()["choices"]
            with Neighbour(server):
                yield server
            assert client.post("/v1/completions", json=ASK).json()["choices"] == before
            assert client.get("/dashboard/data").json()["ended"]["error"] == 0
        assert "Traceback" not in server.said()
        assert not re.search(r'HTTP/1\.1" 5\d\d', server.said())
    finally:
        server.end()


@pytest.fixture(scope="module")
def neighbour(server) -> Iterator[Neighbour]:
    """The second stream, whose pauses are looked at."""
    with Neighbour(server) as neighbour:
        yield neighbour


@pytest.fixture
def client(server, neighbour) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def get(path: str, headers: bytes = HOST) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode("latin-1"), headers)


ODD = {
    "methods": (
        [
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW")
            for path in WATCHED
        ],
        {405},
    ),
    "heads alone": (
        [f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() for path in WATCHED], {200},
    ),
    "query strings": (
        [get(path + query) for path in WATCHED for query in ("?x=1", "?%00%ff", "??;&&==", "?" + "a" * 9000)],
        {200},
    ),
    "paths beside them, without a key": (
        [
            get(path)
            for path in (
                "/metrics/", "/metrics%00", "/metrics%0d%0ax:1", "//metrics", "/METRICS", "/metrics#x",
                "/dashboard/", "/dashboard/../v1/models", "/dashboard/%2e%2e/v1/models",
                "/dashboard/../routes.py", "/dashboard/dashboard.html", "http://evil.example/metrics", "*",
                "/engine/", "/engine/events", "/engine/events?key=secret", "/engine/engine.html",
                "/engine/../v1/models", "/docs/", "/docs%00", "//docs", "/DOCS", "/docs/../v1/models",
                "/docs/oauth2-redirect", "/redoc", "/openapi.json/", "/openapi.json%0a", "/openapi.yaml",
            )
        ],
        {401},
    ),
    "hosts": (
        [
            get(path, headers)
            for path in WATCHED
            for headers in (
                b"", b"host:\r\n", b"host: evil.example\r\n", HOST + b"host: evil.example\r\n",
                b"host: localhost@evil.example\r\n", b"host: \xff\r\n",
            )
        ],
        {400},
    ),
    "headers that change nothing": (
        [
            get("/metrics", HOST + headers + b"\r\n")
            for headers in (
                b"range: bytes=-1", b"range: bytes=" + b"0-1," * 2000 + b"1-2", b"if-none-match: *",
                b"accept: " + b"*/*," * 5000, b"accept-encoding: gzip;q=1e999", b"authorization: \xff",
                b"authorization: Bearer wrong", b"content-length: 99999999999999999999",
                b"transfer-encoding: chunked", b"upgrade: h2c\r\nconnection: upgrade",
                b"\r\n".join(b"x-%d: y" % i for i in range(2000)),
            )
        ],
        {200},
    ),
    "what is no request": (
        [
            get("/metrics", HOST + b"content-length: -1\r\n"),
            get("/metrics", HOST + b"content-length: 1\r\ncontent-length: 2\r\n"),
            b"GET /metrics HTTP/1.0\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), bytes(1000),
        ],
        {400},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_for_the_watchers_pages(server, neighbour, name):
    sent, statuses = ODD[name]
    for one in sent:
        status = server.hears(one).split(b" ")[1]
        assert int(status) in statuses, one[:100]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        *(({"echo": value}, "echo") for value in ("yes", 1, [], {})),
        *(
            ({"logprobs": value}, "logprobs")
            for value in (-1, 21, 2**63, -(2**63), 10**300, 1.5, True, "5", [])
        ),
        *(({"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, 2**100, True, "1", 1e308)),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False, "logprobs": 5}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"echo": True, "prompt": [1, 10**6]}, "prompt"),
        ({"echo": True, "prompt": [-1]}, "prompt"),
        ({"echo": True, "prompt": ""}, "prompt"),
        ({"echo": True, "prompt": "w " * 100_000}, "prompt"),
        ({"echo": True, "prompt": "\ud800"}, "prompt"),
        ({"echo": True, "prompt": "a\ud800", "stream": True, "logprobs": 1}, "prompt"),
        ({"echo": True, "suffix": "x"}, "suffix"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_part_10_added_is_refused_by_name_out_of_its_range(client, change, field):
    answer = client.post("/v1/completions", content=json.dumps(ASK | change), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text[:300]
    assert len(answer.content) < 2000


def test_more_tokens_than_any_number_holds_spoil_no_metric(client):
    """10**400 ended the listener in the middle of its counts, with a traceback each; 10**300 was the sum."""
    stop = ASK | {"logit_bias": {"5": 100}, "stop_token_ids": [5]}
    for exponent in (20, 300, 400):
        body = json.dumps(stop | {"max_tokens": 10**exponent})
        answer = client.post("/v1/completions", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    text = client.get("/metrics").text
    (total,) = re.findall(r"^vllm:request_params_max_tokens_sum{.*} (.*)$", text, re.MULTILINE)
    assert float(total) < 1e9


def crowd(server: Keyed, path: str, size: int, pipelined: int = 1) -> Counter:
    """`size` connections ask at once, each `pipelined` times. How many answers of which status came?"""
    statuses = Counter()
    with ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        there = [
            stack.enter_context(socket.create_connection(address, timeout=DEADLINE)) for _ in range(size)
        ]
        for connection in there:
            connection.sendall(get(path) * (pipelined - 1) + get(path, HOST + b"connection: close\r\n"))
        for connection in there:
            answer = b""
            while piece := connection.recv(2**20):
                answer += piece
            statuses.update(re.findall(rb"HTTP/1\.1 (\d+)", answer))
    return statuses


@pytest.mark.parametrize("path", WATCHED)
def test_a_crowd_of_watchers_is_answered(server, neighbour, path):
    """What it costs is held by `tests/part11/test_routes.py`: one answer serves all who wait for it."""
    assert crowd(server, path, 100) == {b"200": 100}


def unread(server: Keyed) -> None:
    """Clients ask for much and read nothing; some say that they will ask no more."""
    with ExitStack() as stack:
        for i in range(60):
            connection = stack.enter_context(server.connect())
            with suppress(ConnectionResetError):
                connection.sendall(get(WATCHED[i % len(WATCHED)]) * 20)
                if i % 2:
                    connection.shutdown(socket.SHUT_WR)
        with server.client() as client:
            assert client.get("/health").status_code == 200


WATCH = get("/engine/events", HOST + b"authorization: Bearer secret\r\n")


def watch(server: Keyed) -> Counter:
    """Thirty ask to watch the engine. Some of those let in read all the while, the others nothing; then all
    leave. How many answers of which status came?
    """
    with ExitStack() as stack:
        there = [stack.enter_context(server.connect()) for _ in range(30)]
        for connection in there:
            connection.sendall(WATCH)
        statuses = [connection.recv(12).split(b" ")[1] for connection in there]
        let_in = [one for one, status in zip(there, statuses, strict=True) if status == b"200"]
        for _ in range(20):
            for connection in let_in[::2]:
                assert connection.recv(4096), "a stream has no end"
    return Counter(statuses)


def test_so_many_watch_the_engine_and_the_next_are_told_to_wait(server, neighbour):
    wait_until(lambda: watch(server) == {b"200": MAX_WATCHERS, b"429": 30 - MAX_WATCHERS})


def ask(server: Keyed, **fields) -> None:
    """What is asked for may take minutes: that is not this client's concern."""
    with suppress(httpx.TimeoutException), server.client() as client:
        client.post("/v1/completions", json=ASK | fields, timeout=3)


ATTACKS: dict[str, Callable[[Keyed], object]] = {
    "scrapes": lambda server: crowd(server, "/metrics", 50),
    "scrapes, one behind the other": lambda server: crowd(server, "/metrics", 5, 20),
    "the page's data": lambda server: crowd(server, "/dashboard/data", 50),
    "the page": lambda server: crowd(server, "/dashboard", 50),
    "nobody reads": unread,
    "the engine is watched": watch,
    "an echo": lambda server: ask(server, prompt=LONG, echo=True, logprobs=5, max_tokens=0),
    "many echoes": lambda server: ask(server, prompt=["a b"] * 128, echo=True, logprobs=5, max_tokens=0),
    "long echoes": lambda server: ask(server, prompt=[LONG] * 16, echo=True, logprobs=5, max_tokens=0),
    "all of a prompt": lambda server: ask(server, prompt=LONG, prompt_logprobs=20, max_tokens=1),
    "all of it, n times": lambda server: ask(server, prompt=LONG[:200], prompt_logprobs=20, n=64),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_no_stream_pauses_for_watchers_or_echoes(server, neighbour, name):
    ATTACKS[name](server)  # the first one warms up
    held = server.holds()
    assert not neighbour.pauses_for(lambda: ATTACKS[name](server))
    for _ in range(2):
        ATTACKS[name](server)
    print(f"{name}: {held:.0f} MB, then {server.holds():.0f} MB")
    assert server.holds() < held + 60, "memory grows with what is asked"


def test_watchers_that_send_half_a_request_or_read_nothing_are_cut_off(server, neighbour):
    """This server's deadlines are 5 s for a request and 3 s for an answer nobody reads."""
    body = json.dumps(ASK | {"echo": True, "logprobs": 5}).encode()
    head = HEAD.replace(b"host: localhost\r\n", HOST + b"authorization: Bearer secret\r\n") % len(body)
    with ExitStack() as stack:
        sockets = [stack.enter_context(server.connect()) for _ in range(40)]
        for i, connection in enumerate(sockets):
            connection.sendall(
                (b"GET /metrics HT", b"GET /dashboard HTTP/1.1\r\nhost: l", head + body[:9])[i % 3]
            )
        assert_closed(sockets)


def test_leavers_leave_no_echo_running(server, client):
    with ExitStack() as stack:
        for _ in range(20):
            body = json.dumps(ASK | {"prompt": [LONG] * 8, "echo": True, "logprobs": 5, "max_tokens": 200})
            head = HEAD.replace(b"host", b"authorization: Bearer secret\r\nhost") % len(body)
            stack.enter_context(server.connect()).sendall(head + body.encode())

    def only_neighbours() -> bool:
        now = client.get("/dashboard/data").json()["now"]
        return now["running"] + now["waiting"] <= 2

    wait_until(only_neighbours)
