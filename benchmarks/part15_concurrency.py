"""What do users feel, and what does the server get done, as 1, 2, 4 … 128 of them ask at once?

    python -m benchmarks.part15_concurrency [--most 128] [--seats 16]      # about four minutes, quiet

A server in a process of its own for each scheduler, `storyteller`, one thread; one of them at a time. So many
users of a closed loop: each asks again as soon as it has its answer. Of each user's answers the first and the
last are not counted among the latencies: the first ones are a crowd that comes at one moment, and beside the
last ones users are missing. Tokens a second are those that came while all users were there.
"""

import asyncio
import multiprocessing
from collections.abc import Sequence
from functools import partial
from random import Random

from rich.progress import track

from benchmarks.part08_http_latency import HOST, MODEL, Make, serve
from benchmarks.record import record, show, whole_numbers
from engine.load.client import Endpoint, RequestRecord
from engine.load.plan import Job, endless_jobs
from engine.load.report import spread
from engine.load.run import http_client
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler

QUESTION = "What do users feel, and what does the server get done, as 1 to 128 of them ask at once?"
PROMPT_TOKENS, NEW_TOKENS, BUDGET = (8, 64), (16, 64), 512
LEAST_ANSWERS = 32  # at each point, however few users there are
NAMES = ("FIFO", "static", "continuous")
TABLES = {
    "first_word_ms": "ttft_p50", "whole_answer_ms": "e2e_p50", "whole_answer_p95_ms": "e2e_p95",
    "tokens_per_second": "tokens_per_second",
}  # fmt: skip


def schedulers(seats: int) -> dict[str, Make]:
    return dict(
        zip(
            NAMES,
            (
                FIFOScheduler,
                partial(StaticScheduler, max_num_seqs=seats),
                partial(ContinuousScheduler, max_num_seqs=seats, max_num_batched_tokens=BUDGET),
            ),
            strict=True,
        )
    )


async def point(url: str, users: int) -> dict:
    """Latencies in ms and tokens a second, with so many users."""
    rounds = max(3, LEAST_ANSWERS // users + 2)
    jobs = endless_jobs(PROMPT_TOKENS, NEW_TOKENS, Random(users))
    work = [[next(jobs) for _ in range(rounds)] for _ in range(users)]
    async with http_client(url) as http:
        endpoint = Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True})

        async def user(jobs: Sequence[Job]) -> list[RequestRecord]:
            now = asyncio.get_running_loop().time
            return [await endpoint.ask(job, now()) for job in jobs]

        seen = await asyncio.gather(*map(user, work))
    wrong = [one.outcome for answers in seen for one in answers if not one.ok]
    assert not wrong, f"{len(wrong)} requests were not answered: {wrong[0]}"
    counted = [one for answers in seen for one in answers[1:-1]]
    first, last = (spread([getattr(one, name) * 1e3 for one in counted]) for name in ("ttft", "e2e"))
    start = min(answers[0].sent for answers in seen)
    end = min(answers[-1].last for answers in seen)
    tokens = sum(within(one, start, end) for answers in seen for one in answers)
    return {
        "users": users,
        "answers": len(counted),
        "ttft_p50": first["p50"],
        "ttft_p95": first["p95"],
        "tpot_p50": spread([one.tpot * 1e3 for one in counted])["p50"],
        "e2e_p50": last["p50"],
        "e2e_p95": last["p95"],
        "tokens_per_second": tokens / (end - start),
    }


def within(seen: RequestRecord, start: float, end: float) -> float:
    """How many of an answer's tokens came between two moments, if they came evenly."""
    whole = max(seen.last - seen.first, 1e-9)
    share = max(0.0, min(seen.last, end) - max(seen.first, start)) / whole
    return seen.tokens * share


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], most=128, seats=16)
    crowds = [2**i for i in range(options.most.bit_length())]
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[dict]] = {}
    for name, make in schedulers(options.seats).items():
        pipe, there = context.Pipe()
        server = context.Process(target=serve, args=(there, make, options.seats), daemon=True)
        server.start()
        try:
            url = f"http://{HOST}:{pipe.recv()}"
            asyncio.run(point(url, 4))  # warms up
            found[name] = [asyncio.run(point(url, users)) for users in track(crowds, name)]
        finally:
            server.terminate()
            server.join()

    tables = {
        title: {
            "columns": ["users at once", *NAMES],
            "rows": [
                [users, *(round(found[name][i][key], 1) for name in NAMES)] for i, users in enumerate(crowds)
            ],
        }
        for title, key in TABLES.items()
    }
    last = {name: points[-1] for name, points in found.items()}
    path = record(
        "part15_concurrency",
        QUESTION,
        {
            "model": MODEL, "seats": options.seats, "max_num_batched_tokens": BUDGET,
            "prompt_tokens": "{} to {}".format(*PROMPT_TOKENS), "new_tokens": "{} to {}".format(*NEW_TOKENS),
            "torch_threads": 1, "users": crowds, "generator": "on the same machine",
        },
        {
            "points": found,
            "most_users": crowds[-1],
            "tokens_per_second_at_most": {name: one["tokens_per_second"] for name, one in last.items()},
            "continuous_over_fifo": last["continuous"]["tokens_per_second"]
            / last["FIFO"]["tokens_per_second"],
            "e2e_p50_seconds_at_most": {name: one["e2e_p50"] / 1e3 for name, one in last.items()},
        },
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
