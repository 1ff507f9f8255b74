"""How long do 8 users at once wait for their first words through the HTTP server?

    python -m benchmarks.part08_http_latency [--repeats 3] [--requests 6]      # about a minute

A server in a process of its own for each scheduler, and 8 users in this one: each sends a streaming request,
reads it to the end, and sends the next at once, so that 8 are always under way. Sides in turns.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from random import Random

import httpx
import torch
import uvicorn
from rich import print
from rich.table import Table

from benchmarks.record import record
from engine.cache.slots import SlotCache, SlotMemory
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.static import StaticScheduler
from engine.server.app import create_app
from engine.text.tokenizer import Tokenizer

MODEL, HOST = "storyteller", "127.0.0.1"
USERS, NEW_TOKENS, BUDGET = 8, 64, 256
Make = Callable[[SlotCache], Scheduler]
SCHEDULERS: dict[str, Make] = {
    "FIFO (Part 6)": FIFOScheduler,
    "static batches of 8 (Part 7)": partial(StaticScheduler, max_num_seqs=USERS),
    "continuous, 8 at once (Part 8)": partial(
        ContinuousScheduler, max_num_seqs=USERS, max_num_batched_tokens=BUDGET
    ),
}


@dataclass
class Waits:
    """What users of one side saw, over all repeats."""

    first: list[float] = field(default_factory=list)  # ms, request to first words
    whole: list[float] = field(default_factory=list)  # ms, request to the last words
    seconds: float = 0.0
    tokens: int = 0


def serve(pipe: Connection, make: Make, seats: int = USERS) -> None:
    """The server's process, with a scheduler that `make` makes: says its port and serves until terminated."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    memory = SlotMemory(model.config, seats, 256)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, make(memory.plan()), runner, max_model_len=256)
    app = create_app(EngineThread(engine, MODEL))
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="warning"))

    async def run() -> None:
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await running

    asyncio.run(run())


async def user(http: httpx.AsyncClient, prompts: list[list[int]], waits: Waits) -> None:
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        start, first = time.perf_counter(), None
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    last = line
        waits.first.append((first - start) * 1e3)
        waits.whole.append((time.perf_counter() - start) * 1e3)
        waits.tokens += json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]


async def crowd(address: str, work: list[list[list[int]]], waits: Waits) -> None:
    """All users at once, each with several requests in turn."""
    async with httpx.AsyncClient(base_url=address, timeout=120) as http:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompts in work:
                group.create_task(user(http, prompts, waits))
        waits.seconds += time.perf_counter() - start


def percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="of each user, in each repeat")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the servers
    random, vocab_size = Random(0), Tokenizer.from_pretrained(MODEL).vocab_size

    def prompts(number: int) -> list[list[int]]:
        return [
            [random.randrange(1, vocab_size) for _ in range(random.randint(8, 128))] for _ in range(number)
        ]

    context = multiprocessing.get_context("spawn")
    servers, addresses = [], {}
    waits = {name: Waits() for name in SCHEDULERS}
    try:
        for name, make in SCHEDULERS.items():
            pipe, there = context.Pipe()
            servers.append(context.Process(target=serve, args=(there, make), daemon=True))
            servers[-1].start()
            addresses[name] = f"http://{HOST}:{pipe.recv()}"
            asyncio.run(crowd(addresses[name], [prompts(1) for _ in range(USERS)], Waits()))  # warms up
        for _ in range(options.repeats):
            work = [prompts(options.requests) for _ in range(USERS)]  # the same for all sides
            for name, address in addresses.items():
                asyncio.run(crowd(address, work, waits[name]))
    finally:
        for server in servers:
            server.terminate()
            server.join()

    columns = ["scheduler", "first words, ms: median", "95% within", "whole answer, ms: median", "tokens/s"]
    rows = [
        [
            name,
            statistics.median(seen.first),
            percentile(seen.first, 95),
            statistics.median(seen.whole),
            seen.tokens / seen.seconds,
        ]
        for name, seen in waits.items()
    ]
    shown = Table(*columns, title=f"{USERS} users at once, {NEW_TOKENS} tokens each time")
    for row in rows:
        shown.add_row(row[0], *(f"{cell:.0f}" for cell in row[1:]))
    print(shown)
    print(
        record(
            "part08_http_latency",
            "How long do 8 users at once wait for their first words through the HTTP server?",
            {
                "model": MODEL,
                "users": USERS,
                "requests_of_each": options.repeats * options.requests,
                "prompt_tokens": "8 to 128",
                "new_tokens": NEW_TOKENS,
                "max_num_seqs": USERS,
                "max_num_batched_tokens": BUDGET,
            },
            {
                "first_words_ms_p50": rows[-1][1],
                "first_words_ms_p95": rows[-1][2],
                "static_first_words_ms_p95": rows[1][2],
                "fifo_first_words_ms_p95": rows[0][2],
                "tokens_per_second": rows[-1][4],
            },
            {"waits": {"columns": columns, "rows": rows}},
        )
    )


if __name__ == "__main__":
    main()
