"""How long does a swap take, and how long does it make others wait for their next token?

    python -m benchmarks.part18_swap [--rounds 5] [--swaps 8]

An engine in its thread, a stream whose tokens are timed all the while, and another task that gives one name
the one adapter and the other by turns, from the files each time, and asks for one token with it: the step
that computes this token copies the adapter into its slot. The longest pause of the stream is beside that of
as long a time without swaps, in the same round. Figures are medians of the rounds' medians and longest.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part18_engines import ADAPTERS, engine_with_slots
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.decoding.params import SamplingParams
from engine.server.adapters import AdapterEngineThread

FOREVER = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


async def pauses(backend: AdapterEngineThread, until: asyncio.Event) -> list[float]:
    """Seconds between a stream's outputs. When one ends, the next begins; its first token does not count."""
    found, number = [], 0
    while not until.is_set():
        number += 1
        stream = await backend.generate("Once upon a time", FOREVER, f"{id(until)}-{number}")
        last = None
        async for _ in stream:
            now = time.perf_counter()
            found += [now - last] if last else []
            last = now
            if until.is_set():
                break
        await stream.aclose()
    return found


async def measure(rounds: int, swaps: int) -> list[dict[str, list[float]]]:
    """Of each round, ms: of each swap, of the copy in it, and of the stream's pauses with and without."""
    engine, manager = engine_with_slots(4)
    backend = AdapterEngineThread(engine, "base", manager)
    found: dict[str, list[float]] = {}
    write, every = manager.slots.write, []

    def timed(*arguments):
        start = time.perf_counter()
        write(*arguments)
        found["copy"].append((time.perf_counter() - start) * 1e3)

    manager.slots.write = timed
    async with backend:
        for with_swaps in (True, False) * rounds:
            if with_swaps:  # a round begins
                found = {name: [] for name in ("swap", "copy", "with", "without")}
                every.append(found)
            done = asyncio.Event()
            watching = asyncio.create_task(pauses(backend, done))
            await asyncio.sleep(0.3)
            for i in range(swaps):
                begin = time.perf_counter()
                if with_swaps:
                    name = ("poetry", "business")[i % 2]
                    await backend.load_adapter("style", ADAPTERS / name, load_inplace=True)
                    async for _ in await backend.generate("Dear", ONE_TOKEN, f"swap {i}", adapter="style"):
                        pass
                    found["swap"].append((time.perf_counter() - begin) * 1e3)
                await asyncio.sleep(0.1)
            done.set()
            found["with" if with_swaps else "without"] += [1e3 * pause for pause in await watching]
    return every


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], rounds=5, swaps=8)
    torch.set_num_threads(1)
    found = asyncio.run(measure(options.rounds, options.swaps))
    titles = {
        "swap": "a swap, from files to its first token",
        "copy": "of it the copy",
        "with": "pause between two tokens of a stream, with swaps",
        "without": "the same, without",
    }
    medians = {name: [statistics.median(one[name]) for one in found] for name in titles}
    longest = {name: [max(one[name]) for one in found] for name in titles}
    rows = [
        [title, sum(len(one[name]) for one in found), middle(medians[name]), middle(longest[name])]
        for name, title in titles.items()
    ]
    tables = {"swap": {"columns": ["what", "times", "median, ms", "longest of a round, ms"], "rows": rows}}
    figures = {
        "median_ms": {name: quartiles(ms) for name, ms in medians.items()},
        "longest_ms": {name: quartiles(ms) for name, ms in longest.items()},
    }
    workload = {"rounds": options.rounds, "swaps": options.swaps}
    show(record("part18_swap", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
