"""Minutes of everything that clients do to a server, well and badly: is it afterwards what it was before?

    python -m benchmarks.soak [--seconds 600] [--clients 12] [--seed 0] [-- further options of ruvon serve]

Starts `ruvon serve` and sends it, from several clients at once, streams and whole answers, chats, several
choices, log probabilities, and between them clients that leave (before the first word, in the middle, with
half a request sent), malformed bodies, wrong routes, and watchers: see soak_clients. Then: requests, blocks,
threads, files and memory, before and after. Exits with 1 when something was answered wrongly or is left.
Linux only.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import httpx

from benchmarks.load_process import Held, at_rest, held, more
from benchmarks.soak_clients import PATIENCE, Clients
from engine.demo.server import served
from engine.load.run import first_model, http_client

WARM_UP = 10  # visits of each client, before the first count: pools and caches fill when they are first used
GROWTH_MB = 64  # of memory, from the first count to the last: what is more is called a leak
SAMPLES = 120  # looks at the process in between


@dataclass
class Soaked:
    """What a soak has found."""

    before: Held
    after: Held
    over_time: list[tuple[float, int, Held]]  # seconds, visits so far, what was held
    clients: Clients

    @property
    def complaints(self) -> list[str]:
        """What was not as it must be, in words; nothing: all is well."""
        left = more(self.before, self.after)
        growth = self.after.memory_mb - self.before.memory_mb
        return [
            *self.clients.wrong,
            *(f"{name}: {old:g} before, {new:g} after" for name, (old, new) in left.items()),
            *([f"memory has grown by {growth:.0f} MB"] if growth > GROWTH_MB else []),
        ]


async def soak(
    url: str, pid: int, clients: int, seed: int, seconds: float | None = None, visits: int | None = None
) -> Soaked:
    """Send `clients` at once to the server at `url`, whose process is `pid`: for so many `seconds`, or until
    each has made so many `visits`.
    """
    async with http_client(url) as http:
        crowd = Clients(http, await first_model(http))
        await crowd.learn()
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as watcher:

            def look() -> Held:
                return held(watcher, pid)

            await people(crowd, clients, seed, lambda made, _: made < WARM_UP)
            before = await asyncio.to_thread(at_rest, look, None, PATIENCE)
            over_time, start = [], time.monotonic()

            async def sample() -> None:
                while True:
                    now = await asyncio.to_thread(look)
                    over_time.append((time.monotonic() - start, crowd.done.total(), now))
                    await asyncio.sleep((seconds or SAMPLES) / SAMPLES)

            sampling = asyncio.create_task(sample())
            goes_on = (lambda made, _: made < visits) if visits else (lambda _, passed: passed < seconds)
            try:
                await people(crowd, clients, seed + 1, goes_on)
            finally:
                sampling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sampling
            after = await asyncio.to_thread(at_rest, look, before, PATIENCE)
    return Soaked(before, after, over_time, crowd)


async def people(crowd: Clients, clients: int, seed: int, goes_on: Callable[[int, float], bool]) -> None:
    """`goes_on(visits made, seconds passed)`, asked before each client's next visit."""
    start = time.monotonic()

    async def person(number: int) -> None:
        random, made = Random(f"{seed} {number}"), 0
        while goes_on(made, time.monotonic() - start):
            await crowd.visit(random)
            made += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(person(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="further options of ruvon serve, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with served(log, *options.serve) as (url, pid):
            found = asyncio.run(soak(url, pid, options.clients, options.seed, options.seconds))
        tracebacks = log.read_text().count("Traceback")
    complaints = [*found.complaints, *([f"{tracebacks} tracebacks in its log"] if tracebacks else [])]
    report(options, found, complaints)
    for complaint in complaints[:20]:
        print(complaint, file=sys.stderr)
    sys.exit(1 if complaints else 0)


def report(options: argparse.Namespace, found: Soaked, complaints: list[str]) -> None:
    from benchmarks.record import record, show

    before, after = asdict(found.before), asdict(found.after)
    held_rows = [[name.replace("_", " "), round(before[name], 3), round(after[name], 3)] for name in before]
    tables = {
        "held": {
            "columns": ["held by the server", "before", "after"],
            "rows": held_rows,
        },
        "visits": {
            "columns": ["client", "ended", "times"],
            "rows": [[action, ended, times] for (action, ended), times in sorted(found.clients.done.items())],
        },
    }
    figures = {
        "visits": found.clients.done.total(),
        "wrong": len(found.clients.wrong),
        "complaints": complaints[:20],
        "before": before,
        "after": after,
        "over_time": [
            {"seconds": round(seconds, 1), "visits": visits, **asdict(now)}
            for seconds, visits, now in found.over_time
        ],
    }
    question = "Is a server after minutes of hostile and ordinary clients what it was before?"
    workload = {"seconds": options.seconds, "clients": options.clients, "seed": options.seed,
                "server": " ".join(["ruvon serve", *options.serve])}  # fmt: skip
    show(record("part15_soak", question, workload, figures, tables), tables)


if __name__ == "__main__":
    main()
