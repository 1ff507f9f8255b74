"""What do users feel, and what does the server get done, as 1, 4, 16, 64 of them ask at once?

    python -m benchmarks.part15_concurrency [--rounds 5] [--most 64] [--seats 16]      # two or three minutes

A server in a process of its own for each scheduler, `storyteller`, one thread; they take turns in each round,
and who waits does nothing. So many users of a closed loop: each asks again as soon as it has its answer. Of
each user's answers the first and the last are not counted among the latencies: the first ones are a crowd
that comes at one moment, and beside the last ones users are missing. Tokens a second are those that came
while all users were there. Figures are medians of the rounds'.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from random import Random

from rich.progress import track

from benchmarks.load_process import server_process
from benchmarks.part08_http_latency import MODEL, Make, app
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.load.client import Endpoint, RequestRecord
from engine.load.plan import Job, endless_jobs
from engine.load.report import spread
from engine.load.run import http_client
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler

PROMPT_TOKENS, NEW_TOKENS, BUDGET = (8, 64), (8, 24), 512
LEAST_ANSWERS = 8  # that count at each point of a round, however few users there are
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
    answers = max(3, LEAST_ANSWERS // users + 2)  # of each user
    jobs = endless_jobs(PROMPT_TOKENS, NEW_TOKENS, Random(users))
    work = [[next(jobs) for _ in range(answers)] for _ in range(users)]
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
    options = whole_numbers(__doc__.splitlines()[0], rounds=5, most=64, seats=16)
    crowds = [4**i for i in range(options.most.bit_length()) if 4**i <= options.most]
    found: dict[str, list[list[dict]]] = {name: [] for name in NAMES}  # [round][crowd]
    with ExitStack() as stack:
        urls = {}
        for name, make in schedulers(options.seats).items():
            urls[name] = stack.enter_context(server_process(partial(app, make, options.seats)))
            asyncio.run(point(urls[name], 4))  # warms up
        for _ in track(range(options.rounds), "rounds"):
            for name, url in urls.items():
                found[name].append([asyncio.run(point(url, users)) for users in crowds])

    def rounds(name: str, i: int, key: str) -> list[float]:
        return [seen[i][key] for seen in found[name]]

    keys = [key for key in found[NAMES[0]][0][0] if key != "users"]
    kept = {
        name: [{key: quartiles(rounds(name, i, key)) for key in keys} for i in range(len(crowds))]
        for name in NAMES
    }
    points = {
        name: [
            {"users": users} | {key: seen["median"] for key, seen in of.items()}
            for users, of in zip(crowds, kept[name], strict=True)
        ]
        for name in NAMES
    }
    tables = {
        title: {
            "columns": ["users at once", *NAMES],
            "rows": [
                [users, *(middle(rounds(name, i, key)) for name in NAMES)] for i, users in enumerate(crowds)
            ],
        }
        for title, key in TABLES.items()
    }
    path = record(
        "part15_concurrency",
        __doc__.splitlines()[0],
        {
            "model": MODEL, "seats": options.seats, "max_num_batched_tokens": BUDGET,
            "prompt_tokens": "{} to {}".format(*PROMPT_TOKENS), "new_tokens": "{} to {}".format(*NEW_TOKENS),
            "torch_threads": 1, "users": crowds, "rounds": options.rounds,
            "generator": "on the same machine",
        },
        {
            "points": points,
            "rounds": kept,
            "most_users": crowds[-1],
            "tokens_per_second_at_most": {name: of[-1]["tokens_per_second"] for name, of in points.items()},
        },
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
