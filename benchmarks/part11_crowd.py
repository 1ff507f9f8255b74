"""A crowd of clients for a server: people who come at random, in waves, read along, and sometimes leave.

The workload of Part 11's demo and of its pictures. Each client keeps a stopwatch of its own.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

BEGINNINGS = (
    "Once upon a time, there was a little",
    "One day, a boy named Tim went to the park with his red ball. He saw",
    "Lily and her mom were in the kitchen. They wanted to bake a big cake for the party. Lily said",
    "The dog",
)
SEED = 11


@dataclass
class Crowd:
    """What the clients saw. Times are seconds of the monotonic clock."""

    first_pieces: list[float] = field(default_factory=list)  # seconds until each client's first piece of text
    tokens: int = 0  # of answers that were read to the end, by their usage
    finished: int = 0
    left: int = 0


def arrivals(waves: Sequence[tuple[float, float]], seed: int = SEED) -> Iterator[float]:
    """Seconds at which clients come: for each (seconds, clients per second), at random."""
    rng, start = random.Random(seed), 0.0
    for length, rate in waves:
        at = rng.expovariate(rate)
        while at < length:
            yield start + at
            at += rng.expovariate(rate)
        start += length


async def come(address: str, model: str, waves: Sequence[tuple[float, float]]) -> Crowd:
    """Let the crowd loose on the server; one in sixteen leaves in the middle of an answer."""
    crowd, rng = Crowd(), random.Random(SEED)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as http:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for at in arrivals(waves):
                body = {
                    "model": model,
                    "prompt": rng.choice(BEGINNINGS),
                    "max_tokens": rng.randint(30, 160),
                    "temperature": 0.8,
                    "seed": rng.randrange(2**31),
                }
                leaves_after = rng.randint(5, 20) if rng.random() < 1 / 16 else None
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                group.create_task(_client(http, crowd, body, leaves_after))
    return crowd


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
