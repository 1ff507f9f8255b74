"""One model, three voices in one batch; a voice that changes while others speak; and one loaded over HTTP.

python -m parts run 18                  # ends by itself
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part18_engines import ADAPTERS, MODEL, add, engine_with_slots  # noqa: E402
from benchmarks.record import OUT, record  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.lora.adapter import read_adapter  # noqa: E402
from engine.lora.manager import AdapterManager  # noqa: E402
from engine.server.adapters import AdapterEngineThread, adapter_routes  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.server.scored import ScoredCompletions  # noqa: E402
from parts.stage import served, title, yes  # noqa: E402

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
    title(console, "3. A poem streams over HTTP, and somebody loads a voice")
    behind = over_http(console)

    figures = {
        "same_as_alone": same, "kept": kept, "swap_ms": [1e3 * seconds for seconds in swaps],
        "longest_pause_ms": longest, "median_pause_ms": usual, "pieces_after_the_load": behind,
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
    backend = AdapterEngineThread(engine, MODEL, manager)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    swaps, pauses, told, began_with = [], [], [], []

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
            began_with.append(manager.key_of["poetry"])
            told.append(asyncio.create_task(stream(f"poetry {i}", "poetry")))
            await asyncio.sleep(0.05)  # it has begun
            name = ("business", "poetry")[i % 2]
            start = time.perf_counter()
            await backend.load_adapter("poetry", ADAPTERS / name, load_inplace=True)
            swaps.append(time.perf_counter() - start)
        texts = await asyncio.gather(*told)
        await watched
    console.print("[dim]Each asked for 'poetry', and while it spoke the name got another voice:[/]")
    for key, text in zip(began_with, texts, strict=True):
        said = " ".join(f"{PROMPT}{text}".split())
        console.print(f"{key:9}  {escape(said)}", no_wrap=True, overflow="ellipsis")
    return swaps, pauses, all((text == first) == (i % 2 == 0) for i, text in enumerate(texts))


def over_http(console: Console) -> int:
    """How many pieces of the poem came after another client had loaded a voice, and had its answer."""
    engine, manager = engine_with_slots(8)
    backend = AdapterEngineThread(engine, MODEL, manager)
    api = ScoredCompletions(engine.tokenizer)
    api.more_options.append(backend.options)
    app = create_app(backend, [adapter_routes(backend, ADAPTERS)], api=api, details_of=backend.details_of)
    poem: list[str] = []
    said: list[str] = []
    begun, seen = threading.Event(), []

    def ask(path: str, **body) -> httpx.Response:
        said.append(f"[bold]POST {path}[/] {escape(json.dumps(body))}")
        answer = client.post(path, json=body)
        answer.raise_for_status()
        return answer

    def visitor() -> None:
        """Another client: a voice that the server did not have a moment ago."""
        begun.wait()
        said.append(f"[dim]{ask('/v1/load_lora_adapter', lora_name='business').text}[/]")
        letter = ask("/v1/completions", model="business", prompt=PROMPT, max_tokens=40, temperature=0)
        said.append(f"[dim]{escape(PROMPT + letter.json()['choices'][0]['text'])}[/]")
        ask("/v1/unload_lora_adapter", lora_name="business")
        seen.append(len(poem))

    with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        said.append(f"[dim]{ask('/v1/load_lora_adapter', lora_name='poetry').text}[/]")
        other = threading.Thread(target=visitor)
        other.start()
        with Live(console=console, auto_refresh=False) as live:
            for piece in streamed(client, model="poetry", prompt="Shall I", max_tokens=160, temperature=0.5):
                poem.append(piece)
                if len(poem) == 10:
                    begun.set()
                live.update(two_clients("".join(poem), said), refresh=True)
            begun.set()
            other.join()
            live.update(two_clients("".join(poem), said), refresh=True)
    behind = len(poem) - seen[0]
    console.print(f"\nThe poem went on for {behind} more pieces after the visitor had come and gone.")
    return behind


def streamed(client: httpx.Client, **body):
    """The pieces of text of one streamed completion, as they come."""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def two_clients(poem: str, said: list[str]) -> Table:
    table = Table("one client streams", "another one comes by", expand=True)
    table.columns[0].ratio = table.columns[1].ratio = 1
    table.add_row(f"[dim]Shall I[/]{escape(poem)}", "\n".join(said))
    return table


if __name__ == "__main__":
    main()
