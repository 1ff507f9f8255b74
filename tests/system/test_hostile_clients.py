"""`ruvon serve` under clients that mean harm, or are careless: a process, a port, bounded in time and count.

Each test holds one line of what such clients once did to this server. What is bounded is processor time and
memory where it can be: a busy machine changes neither.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from engine.checkpoint import ZOO

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # seconds after which what we wait for will never come: not a promise about speed
MB = 2**20
ASK = {"model": "storyteller", "prompt": "Once upon a time", "temperature": 0}
ENDLESS = ASK | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
JSON = {"content-type": "application/json"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
# `ruvon serve` with other deadlines than its own, so that the tests need not wait for them.
MAIN = """
import sys, resource
import engine.server.limits as limits
for setting in sys.argv.pop(1).split(","):
    name, _, value = setting.partition("=")
    if name == "FILES":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), int(value)))
    elif name:
        assert hasattr(limits, name), name
        setattr(limits, name, float(value))
from engine.cli.main import app
app()
"""


class Process:
    """A server in a process of its own; what it says goes to a file."""

    def __init__(self, folder: Path, settings: str, *arguments: str) -> None:
        self.log = folder / "server.log"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, settings, "serve", "--port", "0", *arguments],
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def port(self) -> int:
        """Known once the server has started."""
        wait_until(lambda: "Uvicorn running" in self.said() or self.process.poll() is not None, 4 * DEADLINE)
        found = re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", self.said())
        assert found, self.said()
        return int(found[1])

    def said(self) -> str:
        return self.log.read_text()

    def client(self) -> httpx.Client:
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE, limits=limits, trust_env=False
        )

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return connection

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak(self) -> float:
        """Most memory ever held since `forget_peak`, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def starting(tmp_path_factory) -> Iterator[dict[str, Process]]:
    """All servers of this file, started at once: each takes seconds to load."""
    several = {
        "main": ("REQUEST_SECONDS=5", "--model", str(ZOO / "storyteller"), "--max-num-seqs", "16"),
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
def server(starting) -> Process:
    """The one that most tests attack. In the end it serves as if nothing had been."""
    server = starting["main"]
    with server.client() as client:
        before = client.post("/v1/completions", json=ASK).json()["choices"]
        yield server
        assert client.post("/v1/completions", json=ASK).json()["choices"] == before
    assert "Traceback" not in server.said()


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def listed(field: str, item: str, size: int = MB - 200) -> bytes:
    """A body of about a megabyte whose `field` is a list of `item`."""
    items = ",".join([item] * (size // (len(item) + 1)))
    return json.dumps(ASK | {field: 0}).replace(f'"{field}": 0', f'"{field}": [{items}]').encode()


def mapped(field: str, value: str, count: int = 80_000) -> str:
    return f'"{field}": {{' + ",".join(f'"{i}":{value}' for i in range(count)) + "}"


BODIES = {
    "empty lists": listed("prompt", "[]"),
    "empty objects": listed("prompt", "{}"),
    "lists of one": listed("prompt", "[1]"),
    "token ids": listed("prompt", "1"),
    "stops that are numbers": listed("stop", "1"),
    "stops": listed("stop", '"a"'),
    "stop tokens that are texts": listed("stop_token_ids", '""'),
    "stop tokens": listed("stop_token_ids", "1"),
    "biases that are texts": ("{" + mapped("logit_bias", '""') + "}").encode(),
    "biases": ("{" + mapped("logit_bias", "1") + "}").encode(),
    "unknown fields": ("{" + ",".join(f'"{i}":0' for i in range(80_000)) + "}").encode(),
    "unknown options": ("{" + mapped("stream_options", "0") + "}").encode(),
    "a long name": json.dumps(ASK | {"model": "a" * (MB - 200)}).encode(),
    "a long salt": json.dumps(ASK | {"cache_salt": "a" * (MB - 200)}).encode(),
    "a long unknown field": json.dumps(ASK | {"a" * (MB - 200): 1}).encode(),
    "a long text": json.dumps(ASK | {"prompt": "word " * (MB // 5 - 100)}).encode(),
    "brackets": b"[" * (MB - 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_costs_little_time_and_little_memory_and_is_not_sent_back(server, client, name):
    """1.4 GB and 82 s for 4 MB of empty lists, it was."""
    assert len(BODIES[name]) <= MB
    client.post("/v1/completions", content=BODIES[name], headers=JSON)  # the first one warms up
    server.forget_peak()
    memory, cpu = server.peak(), server.cpu()
    for _ in range(3):
        answer = client.post("/v1/completions", content=BODIES[name], headers=JSON)
    cpu, memory = (server.cpu() - cpu) / 3, server.peak() - memory
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 2000, "the error repeats what it is about"
    assert cpu < 0.5, f"{cpu:.2f} s of processor time for a body of one megabyte"
    assert memory < 150, f"{memory:.0f} MB for a body of one megabyte"


def test_a_body_over_the_limit_is_refused(client):
    assert client.post("/v1/completions", content=b"x" * 2 * MB, headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "a" * 65}, "stop"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"prompt": ["a"] * 256, "n": 128}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 65}, "n"),
        ({"prompt": [[1]] * 129}, "prompt"),
        ({"n": 129}, "n"),
        ({"user": "a" * 257}, "user"),
        ({"priority": -(2**31)}, "priority"),
        ({"priority": -1}, "priority"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_a_bound_is_refused_beyond_it_by_name(client, change, field):
    answer = client.post("/v1/completions", json=ASK | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_as_many_stops_as_are_accepted_slow_nobody_down_much(server, client):
    """100,000 were accepted once: 0.18 s of processor time per token."""

    def seconds(**fields) -> float:
        before = server.cpu()
        answer = client.post("/v1/completions", json=ASK | {"max_tokens": 150, "ignore_eos": True} | fields)
        assert answer.status_code == 200, answer.text
        return server.cpu() - before

    stops = [letter * 63 + "!" for letter in "etao"]
    seconds()
    with_stops = min(seconds(stop=stops) for _ in range(3))
    assert with_stops < 3 * max(seconds() for _ in range(2))


NEW = itertools.count()


def long() -> dict:
    """An honest request of about 800 tokens, which no cache has seen."""
    return {"model": "storyteller", "prompt": f"{next(NEW)} word " + "word " * 800, "max_tokens": 2}


class Neighbour:
    """Somebody else's stream, read as it comes: when did its pieces arrive?"""

    def __init__(self, server: Process) -> None:
        self.server, self.times, self.stopping = server, [], False
        self.thread = threading.Thread(target=self._read, daemon=True)  # also when it never begins

    def _read(self) -> None:
        with self.server.client() as client:
            while not self.stopping:
                with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
                    assert answer.status_code == 200
                    for line in answer.iter_lines():
                        self.times.append(time.monotonic()) if line else None
                        if self.stopping:
                            return

    def __enter__(self) -> "Neighbour":
        self.thread.start()
        wait_until(lambda: len(self.times) > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping = True
        self.thread.join()

    def longest_pause(self, during: Callable[[], object]) -> float:
        """Seconds between two pieces, at most, while `during` runs and shortly after."""
        first = len(self.times) - 1
        during()
        arrived = len(self.times)
        wait_until(lambda: len(self.times) > arrived + 5)
        times = self.times[first:]
        return max(later - earlier for earlier, later in pairwise(times))

    def pauses_for(self, attack: Callable[[], object], tries: int = 3) -> str:
        """Why the stream pauses too long while `attack` runs, or "". The best try may take 0.25 s, or twice
        what an honest prompt takes on this machine: the two take turns, so that a busy moment is one of both.
        """
        honest, pauses = [], []
        with self.server.client() as client:
            for _ in range(tries):
                honest.append(self.longest_pause(lambda: client.post("/v1/completions", json=long())))
                pauses.append(self.longest_pause(attack))
        print(f"{min(pauses):.3f} s; honest: {max(honest):.3f} s")
        if min(pauses) < max(0.25, 2 * max(honest)):
            return ""
        return f"others' streams pause {pauses} s for it, and {honest} s for an honest prompt"


def send_and_leave(client: httpx.Client, body: bytes) -> None:
    """What is asked for may take minutes: that is not this client's concern."""
    with suppress(httpx.ReadTimeout):
        client.post("/v1/completions", content=body, headers=JSON, timeout=2)


ATTACKS = {
    "empty lists": BODIES["empty lists"],
    "a long text": BODIES["a long text"],
    "texts that fit": json.dumps(ASK | {"prompt": ["word " * 1000] * 128, "max_tokens": 1}).encode(),
    "one word that fits": json.dumps(ASK | {"prompt": ["specially" * 1000] * 100, "max_tokens": 1}).encode(),
    "many sequences": json.dumps(ASK | {"prompt": ["a"] * 128, "max_tokens": 2}).encode(),
    "many samples": json.dumps(ASK | {"n": 128, "max_tokens": 2}).encode(),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_elses_stream_pauses_for_what_one_client_sends(server, client, name):
    """87 s, it was."""
    with Neighbour(server) as neighbour:
        assert not neighbour.pauses_for(lambda: send_and_leave(client, ATTACKS[name]))


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


def assert_closed(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""  # a TimeoutError says that it is still open


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
