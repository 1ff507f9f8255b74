"""What does a bound on the queue cost, if everybody obeys `Retry-After`?

    python -m benchmarks.compare_bound [--people 100] [--seats 8] [--bound 32]      # about two minutes

`ruvon serve` as it is, one thread: with a queue that has room for all, and with a bound; each as
a new server, and after light traffic, requests one after the other. Then a crowd comes at one moment, and
whoever is refused comes back when told. The work is the same on all sides, so a bound that lets no seat stay
empty is done as soon as none.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

import httpx

from benchmarks.record import ROOT, record, show, whole_numbers
from engine.load.client import Endpoint
from engine.load.plan import Job, random_text
from engine.load.run import http_client

QUESTION = "What does a bound on the queue cost, if everybody obeys Retry-After?"
PROMPT_TOKENS, NEW_TOKENS = 16, (160, 960)
BEFORE = 12  # requests of the light traffic


@contextmanager
def server(seats: int, bound: int) -> Iterator[str]:
    """Its address: a process of its own."""
    options = ["--port", "0", "--max-num-seqs", str(seats), "--max-num-queued-reqs", str(bound)]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "serve", *options],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said = iter(process.stderr.readline, "")
        yield next(found[0] for line in said if (found := re.search(r"http://[\w.]+:\d+", line)))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


async def crowd(url: str, people: int, before: int) -> dict:
    """Seconds until the last has an answer, steps of the engine, refusals, and the longest wait told.
    With empty seats the same work takes more steps, which tells on a busy machine, too.
    """
    random, loop = Random(0), asyncio.get_running_loop()
    told: list[float] = []
    async with http_client(url) as http:
        endpoint = Endpoint(http, "storyteller", fields={"temperature": 0, "ignore_eos": True})

        async def person(job: Job) -> None:
            for tries in count():
                seen = await endpoint.ask(job, loop.time())
                if seen.ok:
                    return
                assert seen.retry_after, f"try {tries}: {seen.outcome}"
                told.append(seen.retry_after)
                await asyncio.sleep(seen.retry_after)

        jobs = [
            Job(0.0, random_text(PROMPT_TOKENS, random), random.randint(*NEW_TOKENS)) for _ in range(people)
        ]
        for job in jobs[:before]:
            await person(job)
        start, steps = loop.time(), await num_steps(http)
        await asyncio.gather(*map(person, jobs))
        seconds, steps = loop.time() - start, await num_steps(http) - steps
    return {
        "seconds": seconds,
        "steps": steps,
        "refusals": len(told),
        "longest_told": max(told, default=0.0),
    }


async def num_steps(http: httpx.AsyncClient) -> int:
    """That the engine has made since its start."""
    text = (await http.get("../metrics")).raise_for_status().text
    return int(float(re.search(r"^ruvon:steps_total\S* (\S+)$", text, re.MULTILINE)[1]))


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], people=100, seats=8, bound=32)
    figures, rows = {}, []
    for when, before in (("a new server", 0), ("after light traffic", BEFORE)):
        for name, bound in (
            ("room for all", 10 * options.people),
            (f"room for {options.bound}", options.bound),
        ):
            with server(options.seats, bound) as url:
                found = asyncio.run(crowd(url, options.people, before))
            figures[f"{when}, {name}"] = dict(found)
            rows.append([when, name, round(found.pop("seconds"), 1), *found.values()])
    columns = ["", "queue", "all done after (s)", "steps", "refusals", "longest told (s)"]
    tables = {"crowd": {"columns": columns, "rows": rows}}
    workload = vars(options) | {"before": BEFORE, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    show(record("compare_bound", QUESTION, workload, figures, tables), tables)


if __name__ == "__main__":
    main()
