"""Runs a load generator, as an open loop (requests at given times) or a closed loop (given users). Part 15.

An open loop waits for no answer before it sends the next request. A run also measures its own delays. It gets
the function that sends a request; only `http_client` and `first_model` use HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

import httpx

from engine.client.untrusted import ByteLimit, is_this_machine, parse_json
from engine.load.client import RequestRecord
from engine.load.plan import Job

Ask = Callable[[Job, float], Awaitable[RequestRecord]]
MODELS_SECONDS = 30  # for a server's list of models
TICK = 0.1  # seconds between two measurements of the generator's delay, and between two calls of `tick`


class Run:
    """One run: the records of its requests, and the generator's own delays."""

    def __init__(self, ask: Ask) -> None:
        """The run starts now. `ask(job, due)` sends a job's request and returns its record, as
        `Endpoint.ask` does. Raises RuntimeError outside an event loop.
        """
        self.ask = ask
        self.records: list[RequestRecord] = []  # of requests that have ended, in the order of their ends
        self.num_sent = 0  # requests sent so far
        self.wakeup_delays: list[float] = []  # seconds by which the event loop woke up late, every TICK
        self.start = asyncio.get_running_loop().time()

    async def open_loop(self, jobs: Iterable[Job]) -> None:
        """Send each job when it is due, no matter how many requests are under way; then wait for all answers.
        The jobs come in the order of their times.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due = self.start + job.offset
                await asyncio.sleep(max(0.0, due - loop.time()))
                group.create_task(self._send(job, due))

    async def closed_loop(self, jobs: Iterator[Job], users: int, seconds: float) -> None:
        """Simulate `users` users. Each sends its next job as soon as its last request has ended, until
        `seconds` after the run's start; then wait for the last answers.
        """
        loop = asyncio.get_running_loop()

        async def user() -> None:
            while (now := loop.time()) < self.start + seconds:
                await self._send(next(jobs), now)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _send(self, job: Job, due: float) -> None:
        """Send a job's request, wait for its answer, and keep its record."""
        self.num_sent += 1
        self.records.append(await self.ask(job, due))

    async def watch(self, work: Awaitable[None], tick: Callable[["Run"], None] = lambda run: None) -> None:
        """Await `work`, which is one of the loops above. Meanwhile, every TICK seconds, measure how late the
        event loop wakes up, and call `tick` with this run.
        """

        async def tick_until_cancelled() -> None:
            loop, due = asyncio.get_running_loop(), self.start
            while True:
                due += TICK
                await asyncio.sleep(max(0.0, due - loop.time()))
                self.wakeup_delays.append(loop.time() - due)
                tick(self)

        ticking = asyncio.create_task(tick_until_cancelled())
        try:
            await work
        finally:
            ticking.cancel()


def http_client(url: str, api_key: str | None = None, **options) -> httpx.AsyncClient:
    """An HTTP client for the server at `url`, which may end with /v1. A server on this machine is asked
    without a proxy. Each request has a connection of its own: a kept connection could be closed by the server
    just as it is used again. `options` are further arguments of httpx.AsyncClient.
    """
    base_url = httpx.URL(url)
    if base_url.path in ("", "/"):
        base_url = base_url.copy_with(path="/v1")
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=None,  # `Endpoint.ask` bounds the whole answer
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=not is_this_machine(base_url.host),
        **options,
    )


async def first_model(http: httpx.AsyncClient) -> str:
    """The name of the server's first model. Raises httpx.HTTPError or OSError if the server does not answer
    within MODELS_SECONDS, and ValueError if its answer names no model.
    """
    limit = ByteLimit()
    async with asyncio.timeout(MODELS_SECONDS), http.stream("GET", "models") as answer:
        answer.raise_for_status()
        body = b"".join([limit.take(piece) async for piece in answer.aiter_bytes()])
    try:
        name = parse_json(body)["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise ValueError("it does not say which models it has")
    name.encode()  # raises ValueError for half a character, which no request can have
    return name
