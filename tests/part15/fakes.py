"""A clock that a test winds, and a backend whose answers a test gives word by word."""

import asyncio
from collections.abc import Coroutine

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import SamplingParams
from engine.server.admission import Admission
from engine.server.capacity import Capacity, QueueLimits
from tests.part04.serving import DEADLINE

PARAMS = SamplingParams(temperature=0)
TOKENS = 10  # that a sequence of the desk's may come to


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def output(*samples: tuple[str, str | None]) -> RequestOutput:
    """Samples as (text, finish reason); a token for each character."""
    outputs = [
        CompletionOutput(i, text, list(text.encode()), reason) for i, (text, reason) in enumerate(samples)
    ]
    return RequestOutput("r", "prompt", [1, 2], outputs, all(reason for _, reason in samples))


class Feed:
    """A stream that says what it is told to."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.closed, self.asked = tokens, 0, 0
        self._said: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def say(self, *said: RequestOutput | Exception) -> None:
        for one in said:
            self._said.put_nowait(one)

    def __aiter__(self) -> "Feed":
        return self

    async def __anext__(self) -> RequestOutput:
        self.asked += 1
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    async def aclose(self) -> None:
        self.closed += 1


class Desk:
    """A backend. `tokens`: what each sequence may come to; `looking`: what each check waits for."""

    supports = frozenset()

    def __init__(self) -> None:
        self.tokens, self.healthy = TOKENS, True
        self.error: Exception | None = None
        self.looking: asyncio.Event | None = None
        self.feeds: list[Feed] = []
        self.seen = 0  # requests whose check has begun
        self.options: dict = {}  # of the last of them

    async def __aenter__(self) -> "Desk":
        return self

    async def __aexit__(self, *_) -> None: ...

    def models(self) -> list[str]:
        return ["desk"]

    def health(self) -> bool:
        return self.healthy

    async def abort(self, request_id: str) -> None: ...

    async def generate(self, prompt, params, request_id, **options) -> Feed:
        self.seen += 1
        self.options = options
        if self.looking:
            await self.looking.wait()
        if self.error:
            raise self.error
        self.feeds.append(Feed(self.tokens * params.n))
        return self.feeds[-1]


def admission(reqs: int = 3, tokens: int = 1000, seats: int = 1, clock=None, **options) -> Admission:
    """In front of a `Desk`."""
    return Admission(Desk(), Capacity(QueueLimits(reqs, tokens), seats, clock or Clock()), **options)


def held(backend: Admission) -> tuple[int, int]:
    """Sequences and tokens that are admitted."""
    return backend.capacity.sequences, backend.capacity.tokens


def run(test: Coroutine) -> None:
    """To its end, or to the DEADLINE: what is waited for by then will never come."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await test

    asyncio.run(bounded())


async def turns(task: asyncio.Task) -> None:
    """Let everybody who can go on do so; `task` is to wait meanwhile, or raises here what it ended with."""
    for _ in range(20):
        await asyncio.sleep(0)
    if task.done():
        task.result()
