"""Twenty requests in the memory of five, block by block; samples of one prompt; a prompt seen before.

python -m parts run 12                  # ends by itself
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part12_blocks import (  # noqa: E402
    BLOCK,
    CONTIGUOUS,
    FREE,
    KEPT,
    REQUESTS,
    SHARED,
    Played,
    lengths,
    owners,
    play,
    row,
)
from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.memory import PageMemory  # noqa: E402
from engine.cache.paged import PagedCache  # noqa: E402
from engine.cache.slots import SlotMemory  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.execution.runner import EagerWay, ModelRunner  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.scheduling.continuous import ContinuousScheduler  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import title, yes  # noqa: E402

MODEL = "storyteller"
STORY = (
    "One day, a little girl named Lily went to the park with her mom. They saw a big dog near the river. "
    "The dog had a red ball. Lily wanted to play with the dog, but she was a little scared. Her mom said: "
)
WIDE = 64  # blocks in a row of the map
NAMES = "ABCDEFGHIJKLMNOPQRST"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=REQUESTS))
    asked = lengths()
    prompts = story_prompts(tokenizer, [prompt for prompt, _ in asked])
    outputs = [output for _, output in asked]

    blocks = CONTIGUOUS * model.config.max_positions // BLOCK
    title(
        console,
        f"1. Twenty requests in the memory of {CONTIGUOUS} contiguous ones: {blocks} blocks of {BLOCK}",
    )
    memory = PageMemory(model.config, blocks, BLOCK)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        draw = partial(show, live)
        runner = runner_of(model, memory)
        paged = play(tokenizer, model.config, memory.plan(), runner, prompts, outputs, watch=draw)
    fullest = max(range(len(paged.maps)), key=lambda step: paged.held[step])
    head = f"step {fullest + 1}, when most blocks are taken: {paged.at_once[fullest]} requests run"
    console.print(drawn(paged.maps[fullest], head))
    memory = SlotMemory(model.config, CONTIGUOUS)
    slots = play(tokenizer, model.config, memory.plan(), runner_of(model, memory), prompts, outputs)
    console.print(comparison([row("slots", slots), row("pages", paged)]))
    same = paged.outputs == slots.outputs
    console.print(f"Requests that failed: [bold]{paged.errors}[/]")
    console.print(f"Everybody got the tokens that slots give: [bold]{yes(same)}[/]")

    title(console, "2. Eight samples of one prompt")
    shared, alone = samples(console, tokenizer, model, PageMemory(model.config, blocks, BLOCK))

    title(console, "3. A beginning that was seen before")
    first, second, cached = twice(tokenizer, model, PageMemory(model.config, blocks, BLOCK))
    console.print(
        f"The first request reads 308 tokens: first token after {first * 1e3:.0f} ms.\n"
        f"The second differs in its last 8: {cached} tokens are there already, "
        f"first token after {second * 1e3:.0f} ms."
    )
    figures = {
        "same_tokens": same, "failed": paged.errors, "waste": {"slots": slots.waste, "paged": paged.waste},
        "steps": {"slots": len(slots.held), "paged": len(paged.held)}, "most": max(paged.at_once),
        "preempted": paged.preempted, "sample_blocks": {"shared": shared, "alone": alone},
        "first_token_ms": [first * 1e3, second * 1e3], "cached_tokens": cached,
    }  # fmt: skip
    workload = {"model": MODEL, "requests": REQUESTS, "blocks": blocks, "block_size": BLOCK}
    path = record("part12", "Whose is which block?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def story(tokenizer: Tokenizer, length: int) -> list[int]:
    ids = tokenizer.encode(STORY)
    return (ids * (length // len(ids) + 1))[:length]


def story_prompts(tokenizer: Tokenizer, sizes: list[int]) -> list[list[int]]:
    """Each begins in its own way, so that nobody shares a block."""
    prompts = []
    for name, size in zip(NAMES, sizes, strict=True):
        start = tokenizer.encode(f"Story {name}. ")
        prompts.append(start + story(tokenizer, size - len(start)))
    return prompts


def runner_of(model, memory: PageMemory | SlotMemory) -> ModelRunner:
    return ModelRunner([EagerWay(model, memory)], memory)


def engine_on(tokenizer: Tokenizer, model, memory: PageMemory, cache: PagedCache) -> LLMEngine:
    scheduler = ContinuousScheduler(cache, 8, 512)
    return LLMEngine(tokenizer, model.config, scheduler, runner_of(model, memory))


def show(live: Live, played: Played) -> None:
    """The map after a step: a row of blocks is what one contiguous request would take."""
    live.update(
        drawn(played.maps[-1], f"step {len(played.maps)}: {played.at_once[-1]} requests run"), refresh=True
    )


def drawn(owner: list[int], head: str) -> Group:
    rows = []
    for start in range(0, len(owner), WIDE):
        line = Text(" ")
        for number in owner[start : start + WIDE]:
            line.append(*cell(number))
        rows.append(line)
    legend = Text(" a letter: a request's block   #: of several   ░: free, can be found   ·: free")
    return Group(Text(head, style="bold"), *rows, legend, Text())


def cell(owner: int) -> tuple[str, str]:
    if owner < 0:
        return {FREE: ("·", "dim"), KEPT: ("░", "dim"), SHARED: ("#", "bold")}[owner]
    return NAMES[owner % len(NAMES)], COLOURS[owner % len(COLOURS)]


def comparison(rows: list[list]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "steps", "requests in a step", "at most", "set aside and unused", "preemptions"):
        table.add_column(name, justify="right" if name else "left")
    for name, steps, mean, most, waste, preempted in rows:
        table.add_row(name, str(steps), f"{mean:.1f}", str(most), f"{waste:.1%}", str(preempted))
    return table


def samples(console: Console, tokenizer: Tokenizer, model, memory: PageMemory) -> tuple[int, int]:
    """(blocks in use by eight samples at their most, blocks that eight alone would take)"""
    cache = memory.plan()
    engine = engine_on(tokenizer, model, memory, cache)
    prompt = story(tokenizer, 200)
    params = SamplingParams(n=8, temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    engine.add_request("0", prompt, params)
    most, owner, texts = 0, [], []
    while engine.has_unfinished_requests():
        engine_outputs = engine.step()
        used = cache.usage().tokens_held // BLOCK
        if used >= most:
            most, owner = used, by_sample(cache)
        texts = [sample.text for sample in engine_outputs[-1].outputs] if engine_outputs else texts
    console.print(drawn(owner[: 2 * WIDE], "a letter: a sample's own block"))
    alone = 8 * cache.num_blocks_for(len(prompt) + params.max_tokens)
    for text in texts[:3]:
        console.print(
            Text("   … " + " ".join(text.split()), style="italic"), no_wrap=True, overflow="ellipsis"
        )
    console.print(f"Eight samples hold {most} blocks; without sharing they would hold {alone}.")
    return most, alone


def by_sample(cache: PagedCache) -> list[int]:
    """As `owners`, with the sample's number for the request's."""
    found = owners(cache)
    for seq_id, allocation in cache.allocations.items():
        for block in allocation.table.blocks.tolist():
            if found[block] != SHARED:
                found[block] = int(seq_id.split("/")[1])
    return found


def twice(tokenizer: Tokenizer, model, memory: PageMemory) -> tuple[float, float, int]:
    """(seconds to the first token, the same for a second request, tokens it found)"""
    engine = engine_on(tokenizer, model, memory, memory.plan())
    params = SamplingParams(temperature=0, max_tokens=1)
    waits = []
    for name, token_id in (("warm-up", 5), ("first", 11), ("second", 12)):
        engine.add_request(name, story(tokenizer, 300) + [token_id] * 8 if waits else [5] * 308, params)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            outputs = engine.step()
        waits.append(time.perf_counter() - start)
    return waits[1], waits[2], outputs[-1].num_cached_tokens


if __name__ == "__main__":
    main()
