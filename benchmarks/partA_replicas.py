"""What do two replicas give on one machine's two cores, beside one engine that has both?

    python -m benchmarks.partA_replicas      # where Ray is; some six minutes, on a quiet machine

Three servers take turns, each alone on the machine: `ruvon serve`, `ruvon cluster` with one replica (what
Ray's proxy costs), and with two. A closed loop of users asks each for streams. The load generator runs on the
same cores. When more machines help is reckoned in the article: this measures one.
"""

import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.record import record, show, whole_numbers
from engine.demo.server import environment, served
from engine.load.client import Endpoint
from engine.load.plan import endless_jobs
from engine.load.report import run_figures
from engine.load.run import Run, http_client

MODEL = "storyteller"
START_SECONDS = 240
PROMPT_TOKENS, MAX_TOKENS = (64, 192), (32, 96)
SEATS = ("--max-num-seqs", "16")
ONE, ONE_BEHIND_RAY, TWO = "ruvon serve", "ruvon cluster --replicas 1", "ruvon cluster --replicas 2"


@contextmanager
def clustered(log: Path, *arguments: str) -> Iterator[str]:
    """`ruvon cluster` on a Ray of its own, and its URL. Raises RuntimeError: it did not start."""
    command = [sys.executable, "-m", "engine.cli.main", "cluster", "--port", "0", *arguments]
    variables = environment() | {"PYTHONUNBUFFERED": "1", "RAY_ADDRESS": "local"}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (address := re.search(r"replicas of \S+ at (\S+);", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield address[1]
    finally:
        process.terminate()
        process.wait(120)


async def load(url: str, users: int, seconds: float) -> dict:
    """`engine/load/report.py`'s figures of a closed loop."""
    async with http_client(url) as http:
        endpoint = Endpoint(http, MODEL, fields={"temperature": 0, "ignore_eos": True})
        run = Run(endpoint.ask)
        jobs = endless_jobs(PROMPT_TOKENS, MAX_TOKENS, Random(0))
        await run.watch(run.closed_loop(jobs, users, seconds))
    return run_figures(run.records, run.start, run.wakeup_delays)


def measured(side: str, folder: Path, users: int, seconds: float) -> dict:
    """One round of one side: its server starts, is warmed up, is asked, and ends."""
    if side == ONE:
        with served(folder / "serve.txt", *SEATS) as (url, _):
            asyncio.run(load(url, users, 2))
            return asyncio.run(load(url, users, seconds))
    with clustered(folder / "cluster.txt", "--replicas", side[-1], *SEATS) as url:
        asyncio.run(load(url, users, 2))
        return asyncio.run(load(url, users, seconds))


def main() -> None:
    question = "What do two replicas give on one machine's two cores, beside one engine that has both?"
    options = whole_numbers(question, users=16, seconds=15, rounds=3)
    load_before = os.getloadavg()[0]
    found: dict[str, list[dict]] = {ONE: [], ONE_BEHIND_RAY: [], TWO: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for side, rounds in found.items():
                rounds.append(measured(side, Path(folder), options.users, options.seconds))
                assert not rounds[-1]["failed"], rounds[-1]["failed"]
                assert not rounds[-1]["refused"], rounds[-1]["refused"]

    def row(side: str) -> list:
        rates = [one["output_tokens_per_second"] for one in found[side]]
        cells = [side, statistics.median(rates), min(rates), max(rates)]
        for name, key in (("ttft_seconds", "p50"), ("ttft_seconds", "p95"), ("tpot_seconds", "p50")):
            cells.append(1e3 * statistics.median(one[name][key] for one in found[side]))
        return cells

    columns = ["server", "output tokens/s", "least", "most", "TTFT ms, p50", "p95", "ms a token, p50"]
    shown = {"load": {"columns": columns, "rows": [row(side) for side in found]}}
    workload = {
        "model": MODEL, "users": options.users, "seconds": options.seconds, "rounds": options.rounds,
        "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "cores": os.cpu_count(),
        "load_before": load_before,
    }  # fmt: skip
    show(record("partA_replicas", question, workload, found, shown), shown)


if __name__ == "__main__":
    main()
