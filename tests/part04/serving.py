"""A server on a free port for the length of a `with`, and a backend without a model to put behind it."""

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
import openai
import uvicorn

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server.app import create_app
from engine.server.run import config

DEADLINE = 40.0  # seconds after which what we wait for will never come: not a promise about speed


@contextmanager
def serve(app, port: int = 0, patience: int = 3) -> Iterator[str]:
    """Run `app` in a thread; yields its URL. A test that fails in here shows what the server failed of. In
    the end, answers under way have `patience` seconds.
    """
    failures = _Failures()
    failures.logger.addHandler(failures)
    settings = config(app, "127.0.0.1", port, log_level="critical")
    settings.timeout_graceful_shutdown = patience
    uvicorn.server.asyncio = _Often()
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    except BaseException as error:
        raise error from failures.first
    finally:
        failures.logger.removeHandler(failures)
        server.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the server did not stop"


def lasting_port() -> int:
    """A free port for a server that is to come, or to come again: none of those above 32767, which the system
    gives to whoever asks for any.
    """
    while True:
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", random.SystemRandom().randint(20_000, 32_767)))
            return tried.getsockname()[1]


class _Often:
    """asyncio for uvicorn, which looks every 100 ms whether it is to stop, or has: here, every 5."""

    def __getattr__(self, name: str):
        return getattr(asyncio, name)

    def sleep(self, seconds: float):
        return asyncio.sleep(seconds / 20)


class _Failures(logging.Handler):
    """Keeps the first exception that the server logs."""

    logger = logging.getLogger("engine.server.errors")
    first: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or (record.exc_info and record.exc_info[1])


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.005)


async def ends(task: asyncio.Future) -> bool:
    """Returns as soon as it does, or when it has not for a thousand times 2 ms: whatever waits for nothing
    has ended by then, on a machine that stands still for seconds, too.
    """
    for _ in range(1000):
        done, _ = await asyncio.wait([task], timeout=0.002)
        if done:
            return True
    return False


def http(url: str) -> httpx.Client:
    """A connection of its own for each request: a server may close one after an error."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=DEADLINE, limits=limits, trust_env=False)


@contextmanager
def client_of(backend: "ScriptedBackend", **options) -> Iterator[httpx.Client]:
    """A client of a server in front of the backend; `options` are create_app's."""
    with serve(create_app(backend, **options)) as url, http(url) as client:
        yield client
    assert backend.open == 0, "a stream was left open"


def openai_client(url: str, api_key: str = "unused") -> openai.OpenAI:
    """OpenAI's official client: the judge of our shapes."""
    plain = httpx.Client(timeout=DEADLINE, trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, http_client=plain)


class ScriptedBackend:
    """Says the given pieces one by one, then fails, goes on for ever, or is done."""

    def __init__(
        self,
        pieces: Sequence[str] = ("one", " two", " three"),
        error: Exception | None = None,
        endless: bool = False,
        supports: frozenset[str] = frozenset(),
    ) -> None:
        self.pieces, self.error, self.endless, self.supports = pieces, error, endless, supports
        self.asked: list[tuple] = []  # (prompt, params, request_id, options) of each generate
        self.open = 0  # streams handed out and not closed
        self.life: list[str] = []
        self.healthy = True

    async def __aenter__(self):
        self.life.append("started")
        return self

    async def __aexit__(self, *_):
        self.life.append("stopped")

    def models(self) -> list[str]:
        return ["script", "team/script-2"]

    def health(self) -> bool:
        return self.healthy

    async def generate(self, prompt, params, request_id, **options):
        self.asked.append((prompt, params, request_id, options))
        return ScriptedStream(self, self._outputs(prompt, request_id))

    async def _outputs(self, prompt, request_id):
        text, count = "", 0
        while self.endless or count < len(self.pieces):
            text += self.pieces[count % len(self.pieces)]
            count += 1
            last = not self.endless and not self.error and count == len(self.pieces)
            sample = CompletionOutput(0, text, list(range(count)), "length" if last else None)
            yield RequestOutput(request_id, prompt, [7, 8], [sample], finished=last)
            await asyncio.sleep(0.001 if self.endless else 0)
        if self.error:
            raise self.error

    async def abort(self, request_id) -> None:
        raise AssertionError("the server closes streams instead")


class ScriptedStream:
    """Is open from the moment it is handed out, read or not: only `aclose` gives it back."""

    def __init__(self, backend: ScriptedBackend, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.backend, self.outputs, self.open = backend, outputs, True
        backend.open += 1

    def __aiter__(self):
        return self

    def __anext__(self):
        return anext(self.outputs)

    async def aclose(self) -> None:
        if self.open:
            self.open = False
            self.backend.open -= 1
            await self.outputs.aclose()
