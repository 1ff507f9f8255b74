"""A server in a process of its own, for those who load it; and what its process holds, seen from outside:
memory, threads, files, and what its /metrics says.

Linux only: /proc tells what it holds. A server that has come to rest holds what it held before.
"""

import asyncio
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import torch
import uvicorn
from fastapi import FastAPI

HOST = "127.0.0.1"
POOL = min(32, (os.cpu_count() or 1) + 4)  # as concurrent.futures has it
IDLE = ("running", "waiting", "admitted_sequences", "admitted_tokens")
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "admitted_sequences": "ruvon:admitted_sequences",  # where there is an admission
    "admitted_tokens": "ruvon:admitted_tokens",
}


def serve(pipe: Connection, make_app: Callable[[], FastAPI]) -> None:
    """The server's process, on one torch thread: says its port, and serves until it is terminated."""
    torch.set_num_threads(1)
    server = uvicorn.Server(uvicorn.Config(make_app(), host=HOST, port=0, log_level="warning"))

    async def run() -> None:
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await running

    asyncio.run(run())


@contextmanager
def server_process(make_app: Callable[[], FastAPI]) -> Iterator[str]:
    """The address of a server in a process of its own, which makes its app and ends with the block.

    Raises EOFError if it ends before it serves.
    """
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=serve, args=(there, make_app), daemon=True)
    process.start()
    there.close()  # so that `recv` ends if the process does
    try:
        yield f"http://{HOST}:{pipe.recv()}"
    finally:
        process.terminate()
        process.join()


@dataclass(frozen=True)
class Held:
    """At one moment. A gauge that the server does not have is 0."""

    memory_mb: float
    threads: int
    files: int
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    admitted_sequences: float = 0.0
    admitted_tokens: float = 0.0

    def counts(self) -> dict[str, float]:
        """All but the memory, which no process gives back to the last byte."""
        return {name: value for name, value in asdict(self).items() if name != "memory_mb"}


def held(http: httpx.Client, pid: int) -> Held:
    """Of the process `pid`, whose server `http` asks. The asking itself holds one file."""
    text = http.get("/metrics").raise_for_status().text
    gauges = {
        name: float(found[1])
        for name, metric in GAUGES.items()
        if (found := re.search(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))
    }
    process = Path(f"/proc/{pid}")
    status = (process / "status").read_text()
    return Held(
        memory_mb=int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,
        threads=len(list((process / "task").iterdir())),
        files=len(list((process / "fd").iterdir())),
        **gauges,
    )


def at_rest(look: Callable[[], Held], before: Held | None, seconds: float) -> Held:
    """The first look at which nothing is under way and, with `before`, every count is no more than it was;
    else the last one before `seconds` are over.
    """
    end = time.monotonic() + seconds
    while True:
        now = look()
        idle = not any(getattr(now, name) for name in IDLE)
        if idle and (before is None or not more(before, now)):
            return now
        if time.monotonic() > end:
            return now
        time.sleep(0.1)


def more(before: Held, after: Held) -> dict[str, tuple[float, float]]:
    """The counts that have grown: name -> before, after. asyncio's own pool of threads may: it takes on one
    when all are busy, up to POOL, and keeps it.
    """
    old, new = before.counts(), after.counts()
    return {
        name: (old[name], new[name])
        for name in old
        if new[name] > old[name] + (POOL if name == "threads" else 0)
    }
