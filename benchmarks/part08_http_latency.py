"""How long do 8 users at once wait for their first words through the HTTP server?

    python -m benchmarks.part08_http_latency [--repeats 5] [--requests 6]      # about a minute

A server in a process of its own for each scheduler, and 8 users in this one: each sends a streaming request,
reads it to the end, and sends the next at once, so that 8 are always under way. The sides take turns in each
round; figures are medians of the rounds' medians and percentiles.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from random import Random

import httpx
import torch
from fastapi import FastAPI

from benchmarks.load_process import server_process
from benchmarks.record import middle, quartiles, record, show, whole_numbers
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

MODEL = "storyteller"
USERS, NEW_TOKENS, BUDGET = 8, 64, 256
Make = Callable[[SlotCache], Scheduler]
SCHEDULERS: dict[str, Make] = {
    "FIFO (Part 6)": FIFOScheduler,
    "static batches of 8 (Part 7)": partial(StaticScheduler, max_num_seqs=USERS),
    "continuous, 8 at once (Part 8)": partial(
        ContinuousScheduler, max_num_seqs=USERS, max_num_batched_tokens=BUDGET
    ),
}
TITLES = {
    "first_p50": "first words, ms: median",
    "first_p95": "95% within",
    "whole_p50": "whole answer, ms: median",
    "tokens_per_second": "tokens/s",
}


@dataclass
class Waits:
    """What users of one side saw in one round."""

    first: list[float] = field(default_factory=list)  # ms, request to first words
    whole: list[float] = field(default_factory=list)  # ms, request to the last words
    seconds: float = 0.0
    tokens: int = 0

    def figures(self) -> dict[str, float]:
        """By the keys of TITLES."""
        return {
            "first_p50": statistics.median(self.first),
            "first_p95": statistics.quantiles(self.first, n=20, method="inclusive")[-1],
            "whole_p50": statistics.median(self.whole),
            "tokens_per_second": self.tokens / self.seconds,
        }


def app(make: Make, seats: int = USERS) -> FastAPI:
    """A server's, with a scheduler that `make` makes."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    memory = SlotMemory(model.config, seats, 256)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, make(memory.plan()), runner, max_model_len=256)
    return create_app(EngineThread(engine, MODEL))


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


async def crowd(address: str, work: list[list[list[int]]]) -> Waits:
    """What all users see who are there at once, each with several requests in turn."""
    waits = Waits()
    async with httpx.AsyncClient(base_url=address, timeout=120) as http:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompts in work:
                group.create_task(user(http, prompts, waits))
        waits.seconds = time.perf_counter() - start
    return waits


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=5, requests=6)
    torch.set_num_threads(1)  # as in the servers
    random, vocab_size = Random(0), Tokenizer.from_pretrained(MODEL).vocab_size

    def prompts(number: int) -> list[list[int]]:
        return [
            [random.randrange(1, vocab_size) for _ in range(random.randint(8, 128))] for _ in range(number)
        ]

    found: dict[str, dict[str, list[float]]] = {name: {title: [] for title in TITLES} for name in SCHEDULERS}
    with ExitStack() as stack:
        addresses = {}
        for name, make in SCHEDULERS.items():
            addresses[name] = stack.enter_context(server_process(partial(app, make)))
            asyncio.run(crowd(addresses[name], [prompts(1) for _ in range(USERS)]))  # warms up
        for _ in range(options.repeats):
            work = [prompts(options.requests) for _ in range(USERS)]  # the same for all sides
            for name, address in addresses.items():
                for key, figure in asyncio.run(crowd(address, work)).figures().items():
                    found[name][key].append(figure)

    kept = {name: {key: quartiles(rounds) for key, rounds in of.items()} for name, of in found.items()}
    fifo, static, continuous = kept.values()
    tables = {
        "waits": {
            "columns": ["scheduler", *TITLES.values()],
            "rows": [[name, *map(middle, of.values())] for name, of in found.items()],
        }
    }
    workload = {
        "model": MODEL,
        "users": USERS,
        "requests_of_each": options.repeats * options.requests,
        "rounds": options.repeats,
        "prompt_tokens": "8 to 128",
        "new_tokens": NEW_TOKENS,
        "max_num_seqs": USERS,
        "max_num_batched_tokens": BUDGET,
    }
    figures = {
        "first_words_ms_p50": continuous["first_p50"]["median"],
        "first_words_ms_p95": continuous["first_p95"]["median"],
        "static_first_words_ms_p95": static["first_p95"]["median"],
        "fifo_first_words_ms_p95": fifo["first_p95"]["median"],
        "tokens_per_second": continuous["tokens_per_second"]["median"],
        "rounds": kept,
    }
    show(record("part08_http_latency", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
