"""How many answers come in time, as more is asked for than a server can do: with a bound, and without?

    python -m benchmarks.part15_goodput --percent 300 [--rounds 5] [--seats 8] [--seconds 5]    # some minutes
    python -m benchmarks.part15_goodput         # puts together what was measured at each of PERCENTS

`storyteller`, one thread, a server in a process of its own for each side: no bound, a bound of twice the
seats, a smaller one, no bound but a deadline. A closed loop with twice as many users as seats says what full
seats complete, before and after each round; a round in which that has changed by more than a tenth is taken
again. An open loop offers so many percent of it: requests come by chance (Poisson), each is sent once. In
time is who has all of the answer GOOD_SECONDS after it was due. Counted are the requests of the second half:
the first half fills the queue. In each round the sides take turns, with the same requests. Figures are shares
of what full seats complete in that round.
"""

import asyncio
from contextlib import ExitStack, suppress
from functools import partial
from random import Random

from fastapi import FastAPI

from benchmarks.load_process import server_process
from benchmarks.record import derive, middle, quartiles, read_record, record, show, whole_numbers
from benchmarks.steady import steady_rounds
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

MODEL = "storyteller"
PROMPT_TOKENS, NEW_TOKENS, BUDGET = (8, 32), (32, 96), 256
PERCENTS = (100, 300)  # of what full seats complete
GOOD_SECONDS = 1.0
NO_BOUND = 10**6  # sequences
SMALLER = 13 / 8  # of the seats
CAPACITY_SECONDS = 5


def sides(seats: int) -> dict[str, tuple[int, float | None]]:
    """(bound on the sequences, deadline in seconds) of each side."""
    bounds = (2 * seats, int(SMALLER * seats))
    return {
        "no bound": (NO_BOUND, None),
        **{f"a bound of {bound}": (bound, None) for bound in bounds},
        "a deadline alone": (NO_BOUND, GOOD_SECONDS),
    }


def app(seats: int, bound: int, request_timeout: float | None) -> FastAPI:
    """A side's server."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    memory = SlotMemory(model.config, seats, 256)
    scheduler = ElasticScheduler(memory.plan(), seats, BUDGET)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=256)
    capacity = Capacity(QueueLimits(bound, bound * 256), seats)
    return create_app(Admission(EngineThread(engine, MODEL), capacity, request_timeout))


async def full_seats(url: str, seats: int) -> float:
    """Answers per second when every seat is taken and somebody waits."""
    async with http_client(url) as http:
        run = Run(Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True}).ask)
        await run.closed_loop(endless_jobs(PROMPT_TOKENS, NEW_TOKENS, Random(0)), 2 * seats, CAPACITY_SECONDS)
        in_time = [seen for seen in run.records if seen.end <= run.start + CAPACITY_SECONDS]
        return len(in_time) / CAPACITY_SECONDS


async def offered(url: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """What comes of `rate` requests per second: figures per second, of the requests of the second half. Who
    waits when nobody can be in time any more hangs up, and leaves the server to the next round.
    """
    jobs = poisson_jobs(rate, seconds, PROMPT_TOKENS, NEW_TOKENS, Random(seed))
    async with http_client(url) as http:
        run = Run(Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True}).ask)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + GOOD_SECONDS):
                await run.watch(run.open_loop(jobs))
    counted = [seen for seen in run.records if seen.due >= run.start + seconds / 2]
    good = LatencyLimits(e2e=GOOD_SECONDS)
    return {
        "asked": sum(job.offset >= seconds / 2 for job in jobs) / (seconds / 2),
        "in_time": sum(map(good.are_met, counted)) / (seconds / 2),
        "refused": sum(seen.outcome == "429" for seen in counted) / (seconds / 2),
        "generator_late_ms": max(run.wakeup_delays, default=0.0) * 1e3,
    }


def at(percent: int, rounds: int, seats: int, seconds: int) -> None:
    """Measure one point of the curve."""
    with ExitStack() as stack:
        urls = {}
        for name, (bound, deadline) in sides(seats).items():
            urls[name] = stack.enter_context(server_process(partial(app, seats, bound, deadline)))
            asyncio.run(full_seats(urls[name], seats // 2))  # warms up

        def control() -> float:
            return asyncio.run(full_seats(urls["no bound"], seats))

        def one_round(turn: int, most: float) -> dict[str, dict[str, float]]:
            rate = percent / 100 * most
            return {name: asyncio.run(offered(url, rate, seconds, seed=turn)) for name, url in urls.items()}

        kept = steady_rounds(rounds, control, one_round)
    shares = {
        name: {
            key: [found[name][key] / most for found, most in kept] for key in ("asked", "in_time", "refused")
        }
        for name in sides(seats)
    }  # side -> figure -> of each round
    late = [figures["generator_late_ms"] for found, _ in kept for figures in found.values()]
    row = [f"{percent / 100:g}", *(middle(of["in_time"]) for of in shares.values())]
    tables = {"in_time": {"columns": ["asked for, of what full seats complete", *shares], "rows": [row]}}
    workload = {
        "model": MODEL, "seats": seats, "good_seconds": GOOD_SECONDS,
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "seconds": seconds,
        "rounds": rounds, "torch_threads": 1, "generator": "on the same machine",
    }  # fmt: skip
    figures = {
        "full_seats_complete_per_second": quartiles([most for _, most in kept]),
        "shares": {name: {key: quartiles(of[key]) for key in of} for name, of in shares.items()},
        "generator_late_ms": max(late),
    }
    name = f"part15_goodput_{percent}"
    show(record(name, __doc__.splitlines()[0], workload, figures, tables), tables)


def together() -> None:
    """The curve, of the points that are recorded."""
    records = [read_record(f"part15_goodput_{percent}") for percent in PERCENTS]
    if len({str(one["machine"]) for one in records}) > 1:
        raise ValueError(f"the points {PERCENTS} are of several machines: measure all on one")
    parts = [one["tables"]["in_time"] for one in records]
    rows = [row for part in parts for row in part["rows"]]
    tables = {"in_time": {"columns": parts[0]["columns"], "rows": rows}}
    figures = {
        str(percent): one["figures"] for percent, one in zip(PERCENTS, records, strict=True)
    }  # by percent
    source = f"part15_goodput_{PERCENTS[0]}"
    show(derive("part15_goodput", source, __doc__.splitlines()[0], figures, tables), tables)


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], percent=0, rounds=5, seats=8, seconds=5)
    if args.percent:
        at(args.percent, args.rounds, args.seats, args.seconds)
    else:
        together()


if __name__ == "__main__":
    main()
