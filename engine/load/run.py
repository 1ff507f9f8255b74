"""A run of a load generator: requests sent when they are due, or by so many users. Part 15.

Promises that an open loop waits for no answer, and that the generator's own delays are on record. Knows no
HTTP but for `client` and `first_model`: a run is handed the function that sends a request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

import httpx

from engine.client.untrusted import ByteLimit, is_this_machine, parse_json
from engine.load.client import RequestRecord
from engine.load.plan import Job

Ask = Callable[[Job, float], Awaitable[RequestRecord]]
MODELS_SECONDS = 30  # to say which models there are
TICK = 0.1  # seconds between two measurements of the generator's delay, and two calls of `tick`


class Run:
    """A run: the records so far, and by how much the generator itself was late."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.records: list[RequestRecord] = []  # of requests that are over, in that order
        self.sent = 0  # requests
        self.wakeup_delays: list[float] = []  # seconds by which the event loop was late, every TICK
        self.start = asyncio.get_running_loop().time()

    async def open_loop(self, jobs: Iterable[Job]) -> None:
        """Send each job when it is due, however many are under way; then wait for all answers."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due = self.start + job.at
                await asyncio.sleep(max(0.0, due - loop.time()))
                group.create_task(self._send(job, due))

    async def closed_loop(self, jobs: Iterator[Job], users: int, seconds: float) -> None:
        """So many users, each of whom sends a job as soon as the last one is over, for so many `seconds`."""
        loop = asyncio.get_running_loop()

        async def user() -> None:
            while (now := loop.time()) < self.start + seconds:
                await self._send(next(jobs), now)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _send(self, job: Job, due: float) -> None:
        self.sent += 1
        self.records.append(await self.ask(job, due))

    async def watch(self, work: Awaitable[None], tick: Callable[["Run"], None] = lambda run: None) -> None:
        """Await `work`, one of the loops above. Meanwhile, every TICK, measure how late the event loop is,
        and call `tick`.
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


def client(url: str, api_key: str | None = None, **options) -> httpx.AsyncClient:
    """An HTTP client for `url`, with or without /v1. It uses no proxy for a server on this machine."""
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
    """The name of the server's first model. Raises httpx.HTTPError, OSError or ValueError: it names none."""
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
    return name
