"""How long does a swap take, and how long does it make others wait for their next token?

    python -m benchmarks.part18_swap [--swaps 20]

An engine in its thread, a stream whose tokens are timed all the while, and another task that gives one name
the one adapter and the other by turns, from the files each time, and asks for one token with it: the step
that computes this token copies the adapter into its slot. The longest pause of the stream is beside that of
as long a time without swaps, in the same run.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part18_engines import ADAPTERS, engine_with_slots
from benchmarks.record import record, show
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


async def measure(swaps: int) -> dict[str, list[float]]:
    """Seconds of each swap, of the copy in it, and of the stream's pauses with and without."""
    engine, manager = engine_with_slots(4)
    backend = AdapterEngineThread(engine, "base", manager)
    found: dict[str, list[float]] = {name: [] for name in ("swap", "copy", "with", "without")}
    write = manager.slots.write

    def timed(*arguments):
        start = time.perf_counter()
        write(*arguments)
        found["copy"].append(time.perf_counter() - start)

    manager.slots.write = timed
    async with backend:
        for with_swaps in (True, False) * 2:
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
                    found["swap"].append(time.perf_counter() - begin)
                await asyncio.sleep(0.1)
            done.set()
            found["with" if with_swaps else "without"] += await watching
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = asyncio.run(measure(options.swaps))
    rows = [
        [
            what,
            len(found[name]),
            round(1e3 * statistics.median(found[name]), 2),
            round(1e3 * max(found[name]), 2),
        ]
        for what, name in {
            "a swap, from files to its first token": "swap",
            "of it the copy": "copy",
            "pause between two tokens of a stream, with swaps": "with",
            "the same, without": "without",
        }.items()
    ]
    tables = {"swap": {"columns": ["what", "times", "median, ms", "longest, ms"], "rows": rows}}
    figures = {
        "swap_ms": rows[0][2], "longest_swap_ms": rows[0][3], "copy_ms": rows[1][2],
        "longest_copy_ms": rows[1][3],
        "longest_pause_ms": rows[2][3], "longest_pause_without_ms": rows[3][3],
    }  # fmt: skip
    show(record("part18_swap", __doc__.splitlines()[0], {"swaps": options.swaps}, figures, tables), tables)


if __name__ == "__main__":
    main()
