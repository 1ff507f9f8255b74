"""What hostile tests share: a `ruvon serve` that is a process, what to ask it, a neighbour who streams."""

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import httpx

from engine.models.checkpoint import ZOO
from tests.system.ready import Popen

DEADLINE = 240.0  # seconds after which what we wait for will never come: not a promise about speed
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
            self.process = Popen(
                [sys.executable, "-c", MAIN, settings, "serve", "--port", "0", *arguments],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def port(self) -> int:
        """Known once the server has started."""
        wait_until(lambda: "Uvicorn running" in self.said() or self.process.poll() is not None, 3 * DEADLINE)
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


MAIN_SERVER = ("REQUEST_SECONDS=5", "--model", str(ZOO / "storyteller"), "--max-num-seqs", "16")


@contextmanager
def attacked(server: Process) -> Iterator[Process]:
    """In the end it serves as if nothing had been."""
    with server.client() as client:
        before = client.post("/v1/completions", json=ASK).json()["choices"]
        yield server
        assert client.post("/v1/completions", json=ASK).json()["choices"] == before
    assert "Traceback" not in server.said()


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

    def pauses_for(self, attack: Callable[[], object], tries: int = 10) -> str:
        """Why the stream pauses too long while `attack` runs, or "". The best try may take 0.25 s, or twice
        what an honest prompt takes on this machine: the two take turns, so that a busy moment is one of both.
        One that is good enough ends it, as no later one could make it worse.
        """
        honest, pauses = [], []
        with self.server.client() as client:
            for _ in range(tries):
                honest.append(self.longest_pause(lambda: client.post("/v1/completions", json=long())))
                pauses.append(self.longest_pause(attack))
                if min(pauses) < max(0.25, 2 * max(honest)):
                    print(f"{min(pauses):.3f} s; honest: {max(honest):.3f} s")
                    return ""
        return f"others' streams pause {pauses} s for it, and {honest} s for an honest prompt"


def send_and_leave(client: httpx.Client, body: bytes) -> None:
    """What is asked for may take minutes: that is not this client's concern."""
    with suppress(httpx.TimeoutException):
        client.post("/v1/completions", content=body, headers=JSON, timeout=2)


def assert_closed(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""  # a TimeoutError says that it is still open
