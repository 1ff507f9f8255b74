"""A crowd of clients for a server: people who come in waves, read along, and sometimes leave.

The workload of Part 11's demo and of its pictures. Each client keeps a stopwatch of its own.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

BEGINNINGS = (
    "Once upon a time, there was a little",
    "One day, a boy named Tim went to the park with his red ball. He saw",
    "Lily and her mom were in the kitchen. They wanted to bake a big cake for the party. Lily said",
    "The dog",
)
THINKING = 0.5  # seconds, on average, between an answer and the next question


@dataclass
class Crowd:
    """What the clients saw. Times are seconds of the monotonic clock."""

    first_pieces: list[float] = field(default_factory=list)  # seconds until each client's first piece of text
    tokens: int = 0  # of answers that were read to the end, by their usage
    finished: int = 0
    left: int = 0


async def come(address: str, model: str, waves: Sequence[tuple[float, int]]) -> Crowd:
    """For each (seconds, people): so many ask, read, think, and ask again, until the wave is over. One answer
    in sixteen is left in the middle. However slow the server is, nobody asks before the last answer is read.
    """
    crowd, limits = Crowd(), httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        for number, (seconds, people) in enumerate(waves):
            until = time.perf_counter() + seconds
            for i in range(people):
                group.create_task(_person(http, crowd, model, random.Random(number * 1000 + i), until))
            await asyncio.sleep(seconds)
    return crowd


async def _person(
    http: httpx.AsyncClient, crowd: Crowd, model: str, rng: random.Random, until: float
) -> None:
    while time.perf_counter() < until:
        await asyncio.sleep(rng.expovariate(1 / THINKING))
        body = {
            "model": model,
            "prompt": rng.choice(BEGINNINGS),
            "max_tokens": rng.randint(30, 160),
            "temperature": 0.8,
            "seed": rng.randrange(2**31),
        }
        await _client(http, crowd, body, rng.randint(5, 20) if rng.random() < 1 / 16 else None)


async def _client(http: httpx.AsyncClient, crowd: Crowd, body: dict, leaves_after: int | None) -> None:
    asked, pieces = time.perf_counter(), 0
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                pieces += 1
                if pieces == 1:
                    crowd.first_pieces.append(time.perf_counter() - asked)
                if pieces == leaves_after:
                    crowd.left += 1
                    return
            elif chunk.get("usage"):
                crowd.tokens += chunk["usage"]["completion_tokens"]
                crowd.finished += 1
