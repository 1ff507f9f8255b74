"""What does a server cost, and what does a client wait for?

    python -m benchmarks.part04_server_overhead       # about a minute on a quiet machine

The same request five ways, in turns, in one server's process: Part 3's loop, the loop with each step in
another thread, the backend without HTTP, and HTTP on loopback, in one piece and as a stream. In the same
turns, as many hops to a thread with nothing in them. Beside it: several clients at once, and streams through
a socket that keeps small packets back (Nagle's algorithm). Figures are medians; what a way adds to the one
before is the median of each turn's difference.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import httpx
import torch
import uvicorn
from rich import print
from rich.table import Table

from benchmarks.record import record, spread
from engine.cache.single import CachedForward
from engine.decoding.greedy import decode_steps, generate
from engine.decoding.params import SamplingParams
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.server.app import create_app
from engine.server.backend import LockedBackend
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
HOST = "127.0.0.1"
NEW_TOKENS = 128
CLIENTS = (1, 2, 4)
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
LOOP, HOP = "Part 3's loop", "the loop, each step in a thread"
BARE_HOPS = f"{NEW_TOKENS} hops to a thread with nothing in them"
BACKEND = "backend, no HTTP"
WHOLE, STREAM = "HTTP, in one piece", "HTTP, streamed"
CPU = "processor time"
Measured = list[float]  # milliseconds from the start at which text came


class Server:
    """A process with one model in it: an HTTP server around it, and the same work without HTTP on command."""

    def __init__(self, nagle: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, nagle), daemon=True)
        self._process.start()
        self.client = httpx.Client(base_url=f"http://{HOST}:{self._pipe.recv()}", timeout=60)

    def do(self, what: str) -> Measured:
        self._pipe.send(what)
        return self._pipe.recv()

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.join()


def serve(pipe: Connection, nagle: bool) -> None:
    """The server's process: says its port, then does what comes through `pipe` until it is terminated."""
    torch.set_num_threads(1)
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, transform=pack_linears)
    backend = LockedBackend(MODEL, tokenizer, model.config, lambda: CachedForward(model))
    # A socket that Python made without naming its protocol gets no TCP_NODELAY from asyncio.
    sockets = [socket.create_server((HOST, 0))] if nagle else None
    server = uvicorn.Server(uvicorn.Config(create_app(backend), host=HOST, port=0, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    pipe.send((sockets or server.servers[0].sockets)[0].getsockname()[1])

    def loop() -> Measured:
        start = time.perf_counter()
        done = generate(CachedForward(model), tokenizer, model.config, PROMPT, PARAMS)
        return [(at - start) * 1e3 for at in done.stats.token_times]

    async def through_backend() -> Measured:
        start = time.perf_counter()
        alone = LockedBackend(MODEL, tokenizer, model.config, lambda: CachedForward(model))
        outputs = await alone.generate(PROMPT, PARAMS, "x")
        return [(time.perf_counter() - start) * 1e3 async for _ in outputs]

    async def in_a_thread() -> Measured:
        start, times = time.perf_counter(), []
        steps = decode_steps(CachedForward(model), tokenizer, model.config, PROMPT, PARAMS)
        while await asyncio.to_thread(next, steps, None) is not None:
            times.append((time.perf_counter() - start) * 1e3)
        return times

    async def bare_hops() -> Measured:
        start = time.perf_counter()
        for _ in range(NEW_TOKENS):
            await asyncio.to_thread(int)
        return [(time.perf_counter() - start) * 1e3]

    do = {
        LOOP: loop,
        BARE_HOPS: lambda: asyncio.run(bare_hops()),
        HOP: lambda: asyncio.run(in_a_thread()),
        BACKEND: lambda: asyncio.run(through_backend()),
        CPU: lambda: [time.process_time() * 1e3],
    }
    while True:
        pipe.send(do[pipe.recv()]())


def streamed(client: httpx.Client, tokens: int = NEW_TOKENS) -> Measured:
    start, times = time.perf_counter(), []
    body = BODY | {"stream": True, "max_tokens": tokens}
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith('data: {"id"'):
                times.append((time.perf_counter() - start) * 1e3)
    return times


def in_one_piece(client: httpx.Client) -> Measured:
    start = time.perf_counter()
    client.post("/v1/completions", json=BODY).raise_for_status()
    return [(time.perf_counter() - start) * 1e3]


def at_once(client: httpx.Client, clients: int) -> list[float]:
    """First words of each of several clients that start together, in milliseconds, in order."""
    firsts: list[float] = []
    threads = [threading.Thread(target=lambda: firsts.append(streamed(client)[0])) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(firsts)


def health_ms(client: httpx.Client, calls: int = 50) -> float:
    """The shortest way through the server and back: no model in it."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        client.get("/health")
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)  # as in the servers: it is recorded with the figures
    server, held = Server(), Server(nagle=True)
    client = server.client
    sides: dict[str, Callable[[], Measured]] = {
        LOOP: lambda: server.do(LOOP),
        BARE_HOPS: lambda: server.do(BARE_HOPS),
        HOP: lambda: server.do(HOP),
        BACKEND: lambda: server.do(BACKEND),
        WHOLE: lambda: in_one_piece(client),
        STREAM: lambda: streamed(client),
    }
    try:
        runs: dict[str, list[Measured]] = {name: [] for name in sides}
        work: dict[str, list[float]] = {name: [] for name in sides}  # processor time of the server's process
        for repeat in range(1 + repeats):
            for name, side in sides.items():
                before = server.do(CPU)[0]
                measured = side()
                spent = server.do(CPU)[0] - before
                assert len(measured) == (1 if name in (WHOLE, BARE_HOPS) else NEW_TOKENS), (
                    f"{name}: {len(measured)}"
                )
                if repeat:  # the first one warms up
                    runs[name].append(measured)
                    work[name].append(spent)
        waits = {n: [at_once(client, n) for _ in range(max(3, repeats // 3))] for n in CLIENTS}
        health = health_ms(client)
        # Without a pause between the streams: after one, the client's system acknowledges at once.
        packets = {name: [] for name in ("sent_at_once", "kept_back")}
        for _ in range(max(5, repeats)):
            for name, to in zip(packets, (client, held.client), strict=True):
                packets[name].append([streamed(to, 16)[0] for _ in range(3)][-1])
    finally:
        server.stop()
        held.stop()

    last = {name: statistics.median(run[-1] for run in found) for name, found in runs.items()}
    first = {name: statistics.median(run[0] for run in found) for name, found in runs.items()}
    cpu = {name: statistics.median(found) for name, found in work.items()}

    def added(name: str, to: str) -> list[float]:
        """µs of processor time per token that the way `name` takes more than `to`, in each turn."""
        return [(a - b) / NEW_TOKENS * 1e3 for a, b in zip(work[name], work[to], strict=True)]

    steps = {
        "hop": (HOP, LOOP),
        "backend": (BACKEND, HOP),
        "http": (WHOLE, BACKEND),
        "streaming": (STREAM, WHOLE),
    }
    adds = {f"{name}_adds": added(*ways) for name, ways in steps.items()}
    arrivals = [statistics.median(times) for times in zip(*runs[STREAM], strict=True)]
    figures: dict[str, Any] = {
        "new_tokens": NEW_TOKENS,
        "first_ms": first,
        "last_ms": last,
        "cpu_ms": cpu,
        "us_per_token": {
            "loop": cpu[LOOP] / NEW_TOKENS * 1e3,
            "bare_hop": cpu[BARE_HOPS] / NEW_TOKENS * 1e3,
        }
        | {name: statistics.median(found) for name, found in adds.items()},
        "us_per_token_in_turns": {name: spread(found) for name, found in adds.items()},
        "all_adds": cpu[STREAM] / cpu[LOOP] - 1,
        "first_ms_streamed": first[STREAM],
        "first_ms_in_one_piece": first[WHOLE],
        "wait_ratio": first[WHOLE] / first[STREAM],
        "first_ms_by_packets": {name: statistics.median(found) for name, found in packets.items()},
        "health_ms": health,
        "arrivals_ms": [round(ms, 2) for ms in arrivals],
        "first_ms_of_each_client": {
            str(n): [statistics.median(run[i] for run in found) for i in range(n)]
            for n, found in waits.items()
        },
    }
    columns = [
        "way",
        "first words, ms",
        "last words, ms",
        "processor time in the server, ms",
        "of it, in turns",
    ]
    rows: list[list] = [
        [name, first[name] if name != BARE_HOPS else None, last[name], cpu[name], spread(work[name])]
        for name in sides
    ]
    queue_columns = ["clients at once", "first words of the first, ms", "of the last, ms"]
    queue_rows = [
        [n, each[0], each[-1]] for n, each in zip(CLIENTS, figures["first_ms_of_each_client"].values())
    ]
    for title, names, lines in (
        (f"{NEW_TOKENS} tokens, one client", columns, rows),
        ("one request at a time", queue_columns, queue_rows),
    ):
        shown = Table(*names, title=title)
        for line in lines:
            shown.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in line))
        print(shown)
    print({name: round(value, 3) for name, value in figures.items() if isinstance(value, float)})
    question = "What does an HTTP server cost, and what does a client wait for?"
    workload = {"model": MODEL, "prompt": PROMPT, "new_tokens": NEW_TOKENS, "repeats": repeats}
    tables = {
        "ways": {"columns": columns, "rows": rows},
        "queue": {"columns": queue_columns, "rows": queue_rows},
    }
    print(record("part04_server_overhead", question, workload, figures, tables))


if __name__ == "__main__":
    main()
