"""How many answers come in time, as more is asked for than a server can do: with a bound, and without?

    python -m benchmarks.part15_goodput [--rounds 5] [--seats 8] [--seconds 10]     # 15 minutes

`storyteller`, one thread, a server in a process of its own for each side: no bound, a bound of twice the
seats, no bound but a deadline. First a closed loop with twice as many users as seats says what full seats
complete. Then an open loop offers shares of that: requests come by chance (Poisson), each is sent once. In
time is who has all of the answer GOOD_SECONDS after it was due. Counted are the requests of the second half:
the first half fills the queue. The sides take turns at each share, with the same requests.
"""

import asyncio
import multiprocessing
import statistics
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from random import Random

import torch
import uvicorn

from benchmarks.record import record, show, whole_numbers
from engine.cache.slots import SlotMemory
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.load.client import Endpoint
from engine.load.plan import endless_jobs, poisson_jobs
from engine.load.report import LatencyLimits
from engine.load.run import Run, http_client
from engine.models.loader import load_model
from engine.scheduling.elastic import ElasticScheduler
from engine.server.admission import Admission
from engine.server.app import create_app
from engine.server.capacity import Capacity, QueueLimits
from engine.text.tokenizer import Tokenizer

MODEL, HOST = "storyteller", "127.0.0.1"
PROMPT_TOKENS, NEW_TOKENS, BUDGET = (8, 32), (32, 96), 256
SHARES = (0.5, 1.0, 1.5, 2.0, 3.0)  # of what full seats complete
GOOD_SECONDS = 2.0
NO_BOUND = 10**6  # sequences
CAPACITY_SECONDS = 10


def sides(seats: int) -> dict[str, tuple[int, float | None]]:
    """(bound on the sequences, deadline in seconds) of each side."""
    return {
        "no bound": (NO_BOUND, None),
        "a bound": (2 * seats, None),
        "a deadline alone": (NO_BOUND, GOOD_SECONDS),
    }


def serve(pipe: Connection, seats: int, bound: int, request_timeout: float | None) -> None:
    """The server's process: says its port, and serves until it is terminated."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    memory = SlotMemory(model.config, seats, 256)
    scheduler = ElasticScheduler(memory.plan(), seats, BUDGET)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=256)
    capacity = Capacity(QueueLimits(bound, bound * 256), seats)
    app = create_app(Admission(EngineThread(engine, MODEL), capacity, request_timeout))
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="warning"))

    async def run() -> None:
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await running

    asyncio.run(run())


async def full_seats(url: str, seats: int) -> float:
    """Answers per second when every seat is taken and somebody waits."""
    async with http_client(url) as http:
        run = Run(Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True}).ask)
        await run.closed_loop(endless_jobs(PROMPT_TOKENS, NEW_TOKENS, Random(0)), 2 * seats, CAPACITY_SECONDS)
        in_time = [seen for seen in run.records if seen.end <= run.start + CAPACITY_SECONDS]
        return len(in_time) / CAPACITY_SECONDS


async def offered(url: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """What comes of `rate` requests per second: figures per second, of the requests of the second half."""
    jobs = poisson_jobs(rate, seconds, PROMPT_TOKENS, NEW_TOKENS, Random(seed))
    async with http_client(url) as http:
        run = Run(Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True}).ask)
        await run.watch(run.open_loop(jobs))
    counted = [seen for seen in run.records if seen.due >= run.start + seconds / 2]
    good = LatencyLimits(e2e=GOOD_SECONDS)
    return {
        "asked": len(counted) / (seconds / 2),
        "in_time": sum(map(good.are_met, counted)) / (seconds / 2),
        "refused": sum(seen.outcome == "429" for seen in counted) / (seconds / 2),
        "e2e_p50": statistics.median([seen.e2e for seen in counted if seen.ok] or [0.0]),
        "generator_late_ms": max(run.wakeup_delays, default=0.0) * 1e3,
    }


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5, seats=8, seconds=10)
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        urls = {}
        for name, (bound, deadline) in sides(args.seats).items():
            pipe, there = context.Pipe()
            process = context.Process(target=serve, args=(there, args.seats, bound, deadline), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            urls[name] = f"http://{HOST}:{pipe.recv()}"
            asyncio.run(full_seats(urls[name], args.seats // 2))  # warms up
        most = [asyncio.run(full_seats(urls["no bound"], args.seats)) for _ in range(2)]
        for share in SHARES:
            for turn in range(args.rounds):
                for name, url in urls.items():
                    seen = asyncio.run(offered(url, share * most[0], args.seconds, seed=turn))
                    found.setdefault(name, {}).setdefault(f"{share:g}", []).append(seen)
        most.append(asyncio.run(full_seats(urls["no bound"], args.seats)))
    points = {
        name: {
            share: {
                "in_time": statistics.median(one["in_time"] for one in rounds),
                "least": min(one["in_time"] for one in rounds),
                "most": max(one["in_time"] for one in rounds),
                "refused": statistics.median(one["refused"] for one in rounds),
                "e2e_p50": statistics.median(one["e2e_p50"] for one in rounds),
            }
            for share, rounds in shares.items()
        }
        for name, shares in found.items()
    }
    table = {
        "columns": ["asked for, of what full seats complete", *points],
        "rows": [
            [
                f"{share:g}",
                *(
                    f"{one['in_time']:.1f} ({one['least']:.1f} to {one['most']:.1f})"
                    for one in (shares[f"{share:g}"] for shares in points.values())
                ),
            ]
            for share in SHARES
        ],
    }
    waits = {
        "columns": ["asked for, of what full seats complete", *points],
        "rows": [
            [f"{share:g}", *(shares[f"{share:g}"]["e2e_p50"] for shares in points.values())]
            for share in SHARES
        ],
    }
    tables = {"in_time": table, "whole_answer_seconds": waits}
    path = record(
        "part15_goodput",
        __doc__.splitlines()[0],
        {
            "model": MODEL, "seats": args.seats, "bound": 2 * args.seats, "good_seconds": GOOD_SECONDS,
            "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "seconds": args.seconds,
            "rounds": args.rounds, "torch_threads": 1, "generator": "on the same machine",
        },
        {"full_seats": most[0], "full_seats_each_time": most, "points": points, "rounds": found},
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
