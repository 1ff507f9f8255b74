"""One model, three voices in one batch; and a voice that changes while others speak.

python -m parts run 18                  # ends by itself
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part18_engines import ADAPTERS, MODEL, add, engine_with_slots  # noqa: E402
from benchmarks.record import OUT, record  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.lora.adapter import read_adapter  # noqa: E402
from engine.lora.manager import AdapterManager  # noqa: E402
from engine.server.adapters import AdapterEngine  # noqa: E402
from parts.stage import title, yes  # noqa: E402

PROMPT = "Dear"
VOICES = ("base", "poetry", "business")
TOKENS = 90
SWAPS = 6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    engine, manager = engine_with_slots(8)

    title(console, f"1. Three voices go on from {PROMPT!r}, in one batch")
    for name in VOICES[1:]:
        start = time.perf_counter()
        adapter = read_adapter(ADAPTERS / name, engine.config)
        manager.load(name, adapter)
        console.print(f"{name}: rank {adapter.rank}, loaded after {time.perf_counter() - start:.4f} s")
    together, steps = tell(engine, [None, *VOICES[1:]], console)
    alone = [tell(engine, [name])[0][0] for name in (None, *VOICES[1:])]
    same = together == alone
    console.print(f"\n{steps} steps for all three. Each said what it says alone: [bold]{yes(same)}[/]")

    title(console, "2. A voice changes while others speak")
    swaps, pauses, kept = asyncio.run(swap(engine, manager, console))
    longest, usual = 1e3 * max(pauses), 1e3 * statistics.median(pauses)
    console.print(
        f"\n{SWAPS} swaps, {1e3 * statistics.median(swaps):.1f} ms each in the median, files included.\n"
        f"Meanwhile a stream waited {usual:.1f} ms for a token in the median, {longest:.1f} ms at most.\n"
        f"Who had begun kept their voice: [bold]{yes(kept)}[/]"
    )
    figures = {
        "same_as_alone": same, "kept": kept, "swap_ms": [1e3 * seconds for seconds in swaps],
        "longest_pause_ms": longest, "median_pause_ms": usual,
    }  # fmt: skip
    workload = {"model": MODEL, "prompt": PROMPT, "tokens": TOKENS, "swaps": SWAPS}
    path = record("part18", "Three voices in one batch", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def tell(engine: LLMEngine, names: list, console: Console | None = None) -> tuple[list[str], int]:
    """(texts, steps) of a request for each adapter, all at once; shown as they grow."""
    add(engine, [PROMPT] * len(names), names, TOKENS, temperature=0.5)
    texts, steps = [""] * len(names), 0
    live = Live(console=console, auto_refresh=False) if console else None
    if live:
        live.start()
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            texts[int(output.request_id)] = output.outputs[0].text
        if live:
            live.update(panels(texts), refresh=True)
    if live:
        live.stop()
    return texts, steps


def panels(texts: list[str]) -> Table:
    table = Table(*VOICES, expand=True)
    for column in table.columns:
        column.ratio = 1
    table.add_row(*(f"[dim]{PROMPT}[/]{text}" for text in texts))
    return table


async def swap(engine: LLMEngine, manager: AdapterManager, console: Console):
    """(seconds of each swap, pauses of a base stream meanwhile, whether who had begun kept its voice)"""
    backend = AdapterEngine(engine, MODEL, manager)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    swaps, pauses, told = [], [], []

    async def stream(request_id: str, adapter: str | None) -> str:
        last, text = None, ""
        async for output in await backend.generate(PROMPT, params, request_id, adapter=adapter):
            now, text = time.perf_counter(), output.outputs[0].text
            pauses.extend([now - last] if last and adapter is None else [])
            last = now
        return text

    async with backend:
        first = await stream("poetry alone", "poetry")
        pauses.clear()
        watched = asyncio.create_task(stream("base", None))
        for i in range(SWAPS):
            key = manager.key_of["poetry"]
            told.append(asyncio.create_task(stream(f"poetry {i}", "poetry")))
            await asyncio.sleep(0.05)  # it has begun
            name = ("business", "poetry")[i % 2]
            start = time.perf_counter()
            await backend.load_adapter("poetry", ADAPTERS / name, load_inplace=True)
            swaps.append(time.perf_counter() - start)
            console.print(f"the name 'poetry' led to {key}, leads to {manager.key_of['poetry']} ({name})")
        texts = await asyncio.gather(*told)
        await watched
    return swaps, pauses, all((text == first) == (i % 2 == 0) for i, text in enumerate(texts))


if __name__ == "__main__":
    main()
