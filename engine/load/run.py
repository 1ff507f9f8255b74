"""A run of a load generator: requests sent when they are due, or by so many users. Part 15.

Promises that an open loop waits for nobody, and that how late the generator itself was is on record. Knows no
HTTP but for `client`: who asks is handed in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

import httpx

from engine.client.untrusted import ByteLimit, is_this_machine, parse_json
from engine.load.client import Seen
from engine.load.plan import Job

Ask = Callable[[Job, float], Awaitable[Seen]]
MODELS_SECONDS = 30  # to say which models there are
TICK = 0.1  # seconds between two looks at the clock, and at the progress


class Run:
    """A run: what has been seen so far, and by how much the generator itself was late."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.seen: list[Seen] = []
        self.sent = 0
        self.wakeups: list[float] = []
        self.start = asyncio.get_running_loop().time()

    async def open_loop(self, jobs: Iterable[Job]) -> None:
        """Send each job when it is due, and wait for all in the end."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due = self.start + job.at
                await asyncio.sleep(max(0.0, due - loop.time()))
                group.create_task(self._one(job, due))

    async def closed_loop(self, jobs: Iterator[Job], users: int, seconds: float) -> None:
        """So many users; who has an answer asks again, until `seconds` are over."""
        loop = asyncio.get_running_loop()

        async def user() -> None:
            while (now := loop.time()) < self.start + seconds:
                await self._one(next(jobs), now)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _one(self, job: Job, due: float) -> None:
        self.sent += 1
        self.seen.append(await self.ask(job, due))

    async def watched(self, work: Awaitable[None], tick: Callable[["Run"], None] = lambda run: None) -> None:
        """Do `work`; meanwhile `tick` is called, and each time it is noted how late the call was."""

        async def watch() -> None:
            loop, due = asyncio.get_running_loop(), self.start
            while True:
                due += TICK
                await asyncio.sleep(max(0.0, due - loop.time()))
                self.wakeups.append(loop.time() - due)
                tick(self)

        watching = asyncio.create_task(watch())
        try:
            await work
        finally:
            watching.cancel()


def client(url: str, api_key: str | None = None, **options) -> httpx.AsyncClient:
    """For `url`, with or without /v1; a server of this machine is never asked through a proxy."""
    base = httpx.URL(url)
    base = base.copy_with(path="/v1") if base.path in ("", "/") else base
    return httpx.AsyncClient(
        base_url=base,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=None,  # a request has one of its own
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=not is_this_machine(base.host),
        **options,
    )


async def first_model(http: httpx.AsyncClient) -> str:
    """Its name. Raises httpx.HTTPError, OSError, ValueError: the server does not say."""
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
