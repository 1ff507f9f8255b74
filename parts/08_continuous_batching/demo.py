"""Five requests under three schedulers, a cache too small for them, and three clients streaming at once.

python -m parts run 8                                            # ends by itself; leaves a recording in out/
python -m parts run 8 -- --budget 8 --seats 2 --room 66          # the same scene, other limits
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part08_gantt import (  # noqa: E402
    BUDGET,
    ROOM,
    SCENE,
    SHORT,
    WIDTH,
    Played,
    TightCache,
    play,
    schedulers,
)
from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.cache.slots import SlotMemory  # noqa: E402
from engine.core.engine_thread import EngineThread  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.greedy import generate  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.execution.runner import EagerWay, ModelRunner  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.requests.listeners import Listener, Listeners, StepRecord  # noqa: E402
from engine.requests.request import Request  # noqa: E402
from engine.scheduling.continuous import ContinuousScheduler  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import served, title, yes  # noqa: E402

MODEL = "storyteller"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside with her red ball. "
    "One day, her mom said that they would go to the big park near the river, where many dogs like to run."
)
CLIENTS = (  # prompt, longest answer in tokens, joins when client 1 has so many pieces of its answer
    ("Once upon a time, there was a little dog named Max. Max had a red ball", 160, 0),
    ("One day, a cat sat in the sun", 80, 20),
    ("Lily found a big box. She opened it and saw", 40, 40),
)
COLOURS = {"A": "cyan", "B": "magenta", "c": "green", "d": "yellow", "e": "blue"}
LEVELS = " ▁▂▃▄▅▆▇█"


class StepLog(Listener):
    """When each step ended, and how many tokens of which client were in it."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # request id -> client, in order of arrival
        self.steps: list[tuple[float, dict[int, int]]] = []

    def on_arrival(self, request: Request) -> None:
        self.numbers[request.id] = len(self.numbers)

    def on_step(self, record: StepRecord) -> None:
        clients = [self.numbers[request_id] for request_id in record.request_ids]
        self.steps.append((record.end, dict(zip(clients, record.tokens_computed, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path, default=OUT / "part08_recording.txt", help="where it goes")
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens in a step, at most")
    parser.add_argument("--seats", type=int, default=WIDTH, help="requests at once, at most")
    parser.add_argument(
        "--room", type=int, default=ROOM, help="tokens in the small cache of the second scene"
    )
    options = parser.parse_args()
    recording, budget, seats, room = options.recording, options.budget, options.seats, options.room
    longest = max(guest.prompt + guest.output for guest in SCENE)
    if not 1 <= seats <= budget:
        parser.error(
            f"--seats {seats} --budget {budget}: accepted: 1 or more seats, and as much budget or more"
        )
    if room < longest:
        parser.error(f"--room {room}: accepted: {longest} or more, the length of the longest request")
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    story = tokenizer.encode(STORY)
    prompts = {guest.name: story[: guest.prompt] for guest in SCENE}

    title(console, "1. Two long requests and three short ones, a column per step")
    played = {}
    for name, make in schedulers(seats, budget).items():
        memory = SlotMemory(model.config, seats)
        runner = ModelRunner([EagerWay(model, memory)], memory)
        played[name] = play(tokenizer, model.config, make(memory.plan()), runner, prompts)
        console.print(gantt(f"{name}: {len(played[name].steps)} steps", played[name], budget))
    console.print(legend(budget))
    console.print(latencies(played))
    fifo, *others = played.values()
    same = all(other.outputs == fifo.outputs for other in others)
    console.print(f"All three gave every request the same tokens: [bold]{yes(same)}[/]")

    title(console, f"2. The same five, in a cache with room for {room} tokens")
    memory = SlotMemory(model.config, seats, room)
    scheduler = ContinuousScheduler(TightCache(seats, room), seats, budget)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    tight = play(tokenizer, model.config, scheduler, runner, prompts, max_model_len=room)
    console.print(gantt(f"continuous, {room} tokens of room: {len(tight.steps)} steps", tight, budget))
    console.print(what_was_lost(tight))
    same_again = tight.outputs == fifo.outputs
    console.print(f"Everyone got the same tokens as before: [bold]{yes(same_again)}[/]")

    title(console, "3. Three clients of the HTTP server at once, beside the engine's log")
    log = StepLog()
    memory = SlotMemory(model.config, len(CLIENTS))
    scheduler = ContinuousScheduler(memory.plan(), len(CLIENTS), 256)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, Listeners([log]))
    with served(create_app(EngineThread(engine, MODEL))) as address:
        start, events = asyncio.run(watch(console, address, log))
    lines = recorded(log, events, start)
    recording.parent.mkdir(parents=True, exist_ok=True)
    recording.write_text("\n".join(lines) + "\n")
    texts = ["".join(text for _, client, text in events if client == i) for i in range(len(CLIENTS))]
    alone = [
        generate(CachedForward(model), tokenizer, model.config, prompt, params(tokens)).outputs[0].text
        for prompt, tokens, _ in CLIENTS
    ]
    console.print()
    console.print(joins(log, start))
    sizes = [len(step) for _, step in log.steps]
    console.print(
        f"\n{len(sizes)} steps, {statistics.fmean(sizes):.1f} requests in a step on average.\n"
        f"Every client got the text it would have got alone: [bold]{yes(texts == alone)}[/]\n"
        f"All of it, step by step, is in {shown_path(recording)}"
    )
    figures = {
        "same_tokens": same,
        "same_after_preemption": same_again,
        "same_text_over_http": texts == alone,
        "steps": {name: len(run.steps) for name, run in played.items()},
        "short_latency_steps": {name: [run.latency(g) for g in SHORT] for name, run in played.items()},
        "preempted": tight.preempted,
        "batch_sizes": sizes,
    }
    workload = {"model": MODEL, "max_num_seqs": seats, "max_num_batched_tokens": budget, "room": room}
    path = record("part08", "Who runs in which step?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {shown_path(path)}[/]")


def gantt(name: str, played: Played, budget: int) -> Group:
    """A row per request, a column per step, and below how full the steps were."""
    rows = [Text(name, style="bold")]
    for guest in SCENE:
        row, computed = Text(f" {guest.name}  "), 0
        last = played.ran(guest.name)[-1]
        for number, step in enumerate(played.steps[:last], 1):
            new = step.get(guest.name, 0)
            reads = new > 1 or computed < guest.prompt
            computed += new
            if new:
                row.append("▒" if reads else "█", style=COLOURS[guest.name])
            else:
                row.append(" " if number <= guest.after_step else "·", style="dim")
        rows.append(row)
    full = Text("    ", style="dim")
    for step in played.steps:
        share = min(1.0, sum(step.values()) / budget)
        full.append(LEVELS[max(1, round(share * (len(LEVELS) - 1)))])
    return Group(*rows, full, Text())


def legend(budget: int) -> str:
    return (
        " ▒ reads its prompt   █ one token   · waits\n"
        f" last row: how full the step is, █ being {budget} tokens or more\n"
    )


def what_was_lost(tight: Played) -> str:
    if not tight.preempted:
        return "Memory sufficed: nobody gave way."
    lost = ", ".join(f"{name} gave up {tokens} computed tokens" for name, tokens in tight.preempted)
    times = "once" if len(tight.preempted) == 1 else f"{len(tight.preempted)} times"
    return f"Memory ran out {times}: {lost}. They were computed again."


def latencies(played: dict[str, Played]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("steps from arrival to the last token")
    for guest in SCENE:
        table.add_column(guest.name, justify="right", style=COLOURS[guest.name])
    for name, run in played.items():
        table.add_row(name, *(str(run.latency(guest)) for guest in SCENE))
    return table


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


Events = list[tuple[float, int, str]]  # when, which client, its new text


async def watch(console: Console, address: str, log: StepLog) -> tuple[float, Events]:
    """Let the clients loose and show what they and the engine see. When it began, and what came."""
    events: Events = []

    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        start = time.perf_counter()
        may_join = [asyncio.Event() for _ in CLIENTS]

        def open_doors(pieces: float) -> None:
            for door, (_, _, joins_at) in zip(may_join, CLIENTS, strict=True):
                if pieces >= joins_at:
                    door.set()

        async def ask(client: int, prompt: str, max_tokens: int, _: int) -> None:
            await may_join[client].wait()
            body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        events.append((time.perf_counter(), client, text))
                        open_doors(sum(client == 0 for _, client, _ in events))
            open_doors(float("inf"))  # whoever is left need not wait for client 1

        open_doors(0)
        clients = asyncio.gather(*(ask(i, *client) for i, client in enumerate(CLIENTS)))
        with Live(console=console, auto_refresh=False) as live:
            while not clients.done():
                await asyncio.wait([clients], timeout=0.1)
                live.update(screen(console, events, log, start), refresh=True)
        await clients
    return start, events


def screen(console: Console, events: Events, log: StepLog, start: float) -> Table:
    """Three texts on the left, the engine's last steps on the right."""
    panels, width = [], console.width - 40
    for i, ((prompt, _, _), colour) in enumerate(zip(CLIENTS, COLOURS.values(), strict=False)):
        text = "".join(text for _, client, text in events if client == i)
        lines = Text.assemble((prompt, "dim"), text).wrap(console, width - 4)
        body = Text("\n").join(lines[-6:])
        panels.append(Panel(body, title=f"client {i + 1}", border_style=colour, height=8, width=width))
    lines = ["    ms  step  requests  tokens"]
    for number, (end, step) in list(enumerate(log.steps, 1))[-21:]:
        lines.append(step_line(number, end - start, step))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Group(*panels), Panel(Text("\n".join(lines)), title="the engine's log", height=24, width=38))
    return grid


def step_line(number: int, seconds: float, step: dict[int, int]) -> str:
    return f"{seconds * 1e3:6.0f} {number:5} {len(step):9}  {' + '.join(map(str, step.values())):10}"


def joins(log: StepLog, start: float) -> Panel:
    """The steps around each client's arrival, which the screen has long scrolled past."""
    lines, seen = ["    ms  step  requests  tokens"], set[int]()
    for number, (_, step) in enumerate(log.steps, 1):
        if not seen.issuperset(step):
            for near in range(max(1, number - 1), min(len(log.steps), number + 1) + 1):
                end, tokens = log.steps[near - 1]
                mark = f"  <- client {max(step) + 1} joins" if near == number else ""
                lines.append(step_line(near, end - start, tokens) + mark)
            lines.append("")
        seen |= step.keys()
    return Panel(Text("\n".join(lines).rstrip()), title="the steps in which a client joined", width=64)


def recorded(log: StepLog, events: Events, start: float) -> list[str]:
    """A line per step: its batch, and what the clients received before the next one ended."""
    lines = [
        f"client {i + 1} asks at piece {joins_at} of client 1's answer: {prompt!r}"
        for i, (prompt, _, joins_at) in enumerate(CLIENTS)
    ]
    ends = [end for end, _ in log.steps] + [float("inf")]
    cells = [[""] * len(CLIENTS) for _ in log.steps]  # [step][client]
    for row, (since, until) in zip(cells, pairwise(ends), strict=True):
        for client in range(len(CLIENTS)):
            text = "".join(text for at, who, text in events if who == client and since <= at < until)
            row[client] = json.dumps(text, ensure_ascii=False) if text else ""
    width = max(len(cell) for row in cells for cell in row) + 2
    heads = "".join(f"{f'client {i + 1}':{width}}" for i in range(len(CLIENTS)))
    lines += ["", f"    ms  step  requests  tokens      {heads}".rstrip()]
    for number, ((end, step), row) in enumerate(zip(log.steps, cells, strict=True), 1):
        texts = "".join(f"{cell:{width}}" for cell in row)
        lines.append(f"{step_line(number, end - start, step)}  {texts}".rstrip())
    return lines


def shown_path(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    main()
