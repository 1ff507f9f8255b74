"""`ruvon serve` under clients that mean harm, or are careless: a process, a port, bounded in time and count.

Each test holds one line of what such clients once did to this server.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.system.attack import (
    ASK,
    DEADLINE,
    ENDLESS,
    HEAD,
    MAIN_SERVER,
    Process,
    assert_closed,
    attacked,
    wait_until,
)


@pytest.fixture(scope="module")
def starting(tmp_path_factory) -> Iterator[dict[str, Process]]:
    """All servers of this file, started at once: each takes seconds to load."""
    several = {
        "main": MAIN_SERVER,
        "few files": (
            "FILES=256", "--allow-priority", "--allowed-host", "my.example", "--served-model-name", "tale",
        ),
        "stopped": ("SHUTDOWN_SECONDS=2",),
        "interrupted": ("SHUTDOWN_SECONDS=600",),
    }  # fmt: skip
    servers = {name: Process(tmp_path_factory.mktemp("server"), *given) for name, given in several.items()}
    yield servers
    for server in servers.values():
        server.end()


@pytest.fixture(scope="module")
def server(starting) -> Iterator[Process]:
    """The one that most tests attack."""
    with attacked(starting["main"]) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_slow_sockets_are_closed_in_time(server, client):
    """500 of 500 were still open after 35 s. This server's deadline is 5 s, not 20."""
    body = json.dumps(ENDLESS).encode()
    parts = [b"", b"POST /v1/compl", HEAD % len(body), HEAD % len(body) + body[:20]]
    with ExitStack() as stack:
        sockets = [stack.enter_context(server.connect()) for _ in range(100)]
        for i, connection in enumerate(sockets):
            connection.sendall(parts[i % len(parts)])
        assert client.get("/health").status_code == 200
        assert_closed(sockets)


def test_leavers_leave_nothing_running(server, client):
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(server.connect())
            body = json.dumps(ENDLESS | {"n": 2}).encode()
            connection.sendall(HEAD % len(body) + body)
            connection.recv(100)
    assert client.post("/v1/completions", json=ASK).status_code == 200

    def at_rest() -> bool:
        before = server.cpu()
        time.sleep(0.5)
        return server.cpu() - before < 0.1

    wait_until(at_rest)


def test_it_answers_to_this_machines_names_only(server, client):
    """A page may give this machine a name of its own, and read what is served here."""
    hosts = {"localhost": 200, "127.0.0.1:80": 200, "[::1]:1": 200, "evil.example": 400, "my.example": 400}
    for host, status in hosts.items():
        assert client.get("/v1/models", headers={"host": host}).status_code == status, host


def test_a_folder_is_not_told(client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["storyteller"]


def test_silent_sockets_beyond_the_files_there_are_keep_nobody_out(starting):
    """With 256 files, 300 of them once made /health time out, and wrote 56 MB into the log."""
    server = starting["few files"]
    with server.client() as client, ExitStack() as stack:
        before = server.cpu()
        for _ in range(300):
            stack.enter_context(server.connect())
        for _ in range(20):
            assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json=ASK | {"model": "tale", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert server.cpu() - before < 3
        assert len(server.said()) < 50_000
        assert "Traceback" not in server.said()


def test_what_the_operator_allows_is_allowed(starting):
    with starting["few files"].client() as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tale"]
        assert client.get("/v1/models", headers={"host": "my.example"}).status_code == 200
        ask = ASK | {"model": "tale", "max_tokens": 2}
        statuses = [
            client.post("/v1/completions", json=ask | {"priority": p}).status_code for p in (-2, 2, 3)
        ]
        assert statuses == [200, 200, 400]


@contextmanager
def hung_clients(server: Process) -> Iterator[None]:
    """A half-sent body, a stream that nobody reads, a socket that says nothing."""
    with ExitStack() as stack:
        body = json.dumps(ENDLESS | {"n": 32}).encode()
        for sent in (HEAD % len(body) + body[:20], HEAD % len(body) + body, b"POST", b""):
            stack.enter_context(server.connect()).sendall(sent)
        before = server.cpu()
        wait_until(lambda: server.cpu() > before + 0.3)  # the stream is under way
        yield


def test_sigterm_ends_the_process_whatever_clients_do(starting):
    """It never ended: a half-sent body held it for ever. This server's deadline is 2 s, not 10."""
    server = starting["stopped"]
    with hung_clients(server):
        server.process.terminate()
        server.process.wait(DEADLINE / 2)
    assert "Traceback" not in server.said()
    assert "Cancel" in server.said()


def test_a_second_interrupt_ends_it_at_once_and_without_tracebacks(starting):
    """This server would wait 600 s for the answers under way."""
    server = starting["interrupted"]
    with hung_clients(server):
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "Shutting down" in server.said())
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(DEADLINE / 2) == 0
    assert "Traceback" not in server.said()
