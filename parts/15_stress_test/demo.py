"""A hundred people ask at the same moment, memory runs out while they read, and the server is told to end.

python -m parts run 15                 # ends by itself
"""

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.memory import PageMemory  # noqa: E402
from engine.core.engine_thread import EngineThread  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.execution.runner import EagerWay, Logits, ModelRunner, Way  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.requests.batch import Batch  # noqa: E402
from engine.scheduling.elastic import ElasticScheduler  # noqa: E402
from engine.server.admission import Admission  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.server.capacity import Capacity, QueueLimits  # noqa: E402
from engine.server.deadline import add_deadlines  # noqa: E402
from engine.server.run import config  # noqa: E402
from engine.server.shutdown import DrainingServer  # noqa: E402
from engine.server.watch import StepWatch  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import HOST, title, yes  # noqa: E402

MODEL = "storyteller"
PEOPLE, SEATS, ROOM = 100, 8, 32
TOKENS = 40  # of each answer
SQUEEZED = 3  # tokens of a step that there is memory for, when there is hardly any
SHUTDOWN = 0.5  # seconds for answers under way, in the last scene
PROMPTS = (
    "Once upon a time, there was a little",
    "One day, a boy named Tim went to the park with his red ball. He saw",
    "Lily and her mom were in the kitchen. Lily said",
    "The dog",
)
STATES = {  # of a person: how the board shows it
    "asks": ("·", "dim"),
    "told to come again": ("○", "yellow"),
    "in the queue": ("◔", "cyan"),
    "reads": ("●", "blue"),
    "has it all": ("■", "green"),
    "has a part": ("◧", "magenta"),
    "was told why not": ("×", "red"),
}


class Squeezable:
    """A way whose memory can be taken away: an injected error, of the GPU's own kind."""

    def __init__(self, way: Way) -> None:
        self.way, self.most = way, None

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def __call__(self, batch: Batch) -> Logits:
        if self.most and batch.num_tokens > self.most:
            raise torch.OutOfMemoryError(f"injected: no memory for {batch.num_tokens} tokens")
        return self.way(batch)


@dataclass
class Crowd:
    """What the people saw."""

    states: list[str] = field(default_factory=lambda: ["asks"] * PEOPLE)
    texts: dict[int, str] = field(default_factory=dict)
    refusals: Counter = field(default_factory=Counter)  # by code
    first_words: list[float] = field(default_factory=list)  # seconds since the ask that was taken on
    done: threading.Event = field(default_factory=threading.Event)
    closing: bool = False  # the server has been told to end: nobody need wait to find that out


def build() -> tuple[LLMEngine, Squeezable]:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
    memory = PageMemory(model.config, SEATS * model.config.max_positions // 16)
    scheduler = ElasticScheduler(memory.plan(), SEATS, 256)
    way = Squeezable(EagerWay(model, memory))
    runner = ModelRunner([way], memory)
    return LLMEngine(tokenizer, model.config, scheduler, runner, recover=scheduler.recover), way


def alone(engine: LLMEngine) -> list[str]:
    """What each prompt is answered when nobody else asks."""
    texts = []
    for prompt in PROMPTS:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        engine.add_request("alone", prompt, params)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        texts.append(output.outputs[0].text)
    return texts


@contextmanager
def serving(engine: LLMEngine, sequences: int):
    """(server, its address, the admission control)"""
    capacity = Capacity(QueueLimits(sequences, 10**6), SEATS)
    backend = Admission(EngineThread(engine, MODEL), capacity, watch=StepWatch(engine))
    app = create_app(backend, extensions=[add_deadlines])
    server = DrainingServer(config(app, HOST, 0, log_level="error"), backend, SHUTDOWN)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server, f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}", backend
    finally:
        server.should_exit = True
        thread.join()


async def come(address: str, crowd: Crowd) -> None:
    """Everybody at once; who is told to come again does."""
    # A connection kept while its person waits may be closed by the server just when it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(person(client, crowd, i) for i in range(PEOPLE)))
    crowd.done.set()


async def person(client: httpx.AsyncClient, crowd: Crowd, i: int) -> None:
    body = {
        "model": MODEL, "prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    while True:
        asked = time.perf_counter()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 200:
                    return await read(answer, crowd, i, asked)
                error = json.loads(await answer.aread())["error"]
        except httpx.TransportError:  # the server is gone
            error = {"code": "gone"}
        crowd.refusals[error["code"]] += 1
        if error["code"] != "queue_full":
            crowd.states[i] = "was told why not"
            return
        crowd.states[i] = "told to come again"
        until = time.perf_counter() + int(answer.headers["retry-after"])
        while time.perf_counter() < until and not crowd.closing:
            await asyncio.sleep(0.05)


async def read(answer: httpx.Response, crowd: Crowd, i: int, asked: float) -> None:
    crowd.states[i], text = "in the queue", ""
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            crowd.refusals[chunk["error"]["code"]] += 1
            crowd.states[i] = "was told why not"
            return
        if not text:
            crowd.first_words.append(time.perf_counter() - asked)
            crowd.states[i] = "reads"
        (choice,) = chunk["choices"]
        text += choice["text"]
        if choice["finish_reason"]:
            crowd.states[i] = "has it all" if choice["finish_reason"] == "length" else "has a part"
            crowd.texts[i] = text


def board(crowd: Crowd, backend: Admission, engine: LLMEngine, since: float) -> Group:
    """A mark for each person, and what the server says."""
    marks = Text()
    for i, state in enumerate(crowd.states):
        mark, style = STATES[state]
        marks.append(mark + (" " if (i + 1) % 25 else "\n"), style)
    legend, counts = Text(), Counter(crowd.states)
    for state, (mark, style) in STATES.items():
        if counts[state] or state in ("told to come again", "in the queue", "reads", "has it all"):
            legend.append(f"{mark} {state} {counts[state]:<3} ", style)
    limit = backend.capacity.limits.max_num_queued_reqs
    scheduler = engine.scheduler
    line = (
        f"{time.perf_counter() - since:.1f} s: {backend.capacity.sequences} of {limit} admitted, "
        f"{backend.refused['queue_full']} refusals, {scheduler.num_out_of_memory} × out of memory, "
        f"steps ≤ {scheduler.max_num_batched_tokens}\n"
    )
    return Group(marks, legend, Text(line, "dim"))


def scene(console: Console, engine: LLMEngine, sequences: int, act=lambda crowd, server: None) -> tuple:
    """A crowd, from its coming to its end: (the crowd, seconds). `act` is called ten times a second."""
    crowd, since = Crowd(), time.perf_counter()
    with serving(engine, sequences) as (server, address, backend), Live(console=console) as live:
        people = threading.Thread(target=asyncio.run, args=(come(address, crowd),))
        people.start()
        while not crowd.done.wait(0.1):
            act(crowd, server)
            live.update(board(crowd, backend, engine, since))
        people.join()
        live.update(board(crowd, backend, engine, since))
    return crowd, time.perf_counter() - since


def everybodys_own(crowd: Crowd, texts: list[str]) -> bool:
    """Whether each has their own text: all of it, or its beginning."""
    own = [
        texts[i % len(PROMPTS)].startswith(crowd.texts.get(i, ""))
        and (crowd.states[i] != "has it all" or crowd.texts[i] == texts[i % len(PROMPTS)])
        for i in range(PEOPLE)
    ]
    return all(own)


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95)}


def main() -> None:
    torch.set_num_threads(1)
    console = Console(highlight=False)
    engine, way = build()
    texts, figures = alone(engine), {}

    title(console, f"1. {PEOPLE} people at once; {SEATS} seats, and a queue with room for all")
    crowd, seconds = scene(console, engine, 10 * PEOPLE)
    figures["room for all"] = shown(console, crowd, seconds, texts)

    title(console, f"2. At most {ROOM} are taken on; the others are told when to come again")
    crowd, seconds = scene(console, engine, ROOM)
    figures["bounded"] = shown(console, crowd, seconds, texts)

    title(console, f"3. Memory runs out: from the 20th answer to the 60th, beyond {SQUEEZED} tokens a step")

    def squeeze(crowd: Crowd, _) -> None:
        way.most = SQUEEZED if 20 <= len(crowd.texts) < 60 else None

    crowd, seconds = scene(console, engine, ROOM, squeeze)
    way.most = None
    figures["squeezed"] = shown(console, crowd, seconds, texts)
    figures["squeezed"]["out_of_memory_steps"] = engine.scheduler.num_out_of_memory

    title(console, f"4. SIGTERM while they read; answers have {SHUTDOWN} s to finish")

    def end(crowd: Crowd, server) -> None:
        crowd.closing |= len(crowd.texts) >= 20
        server.should_exit |= crowd.closing

    crowd, seconds = scene(console, engine, ROOM, end)
    figures["ended"] = shown(console, crowd, seconds, texts)

    title(console, "How long until the first word, once taken on")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("scene", "p50", "p95", "all done after"):
        table.add_column(column, justify="left" if column == "scene" else "right")
    for name, found in figures.items():
        waits = found["first_word_seconds"]
        table.add_row(name, f"{waits['p50']:.2f} s", f"{waits['p95']:.2f} s", f"{found['seconds']:.1f} s")
    console.print(table)
    workload = {"people": PEOPLE, "seats": SEATS, "room": ROOM, "tokens": TOKENS}
    path = record("part15", "What do 100 people see?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def shown(console: Console, crowd: Crowd, seconds: float, texts: list[str]) -> dict:
    own = everybodys_own(crowd, texts)
    console.print(f"Each has their own text, all of it or its beginning: [bold]{yes(own)}[/]")
    return {
        "seconds": seconds,
        "first_word_seconds": percentiles(crowd.first_words),
        "ended": dict(Counter(crowd.states)),
        "refusals": dict(crowd.refusals),
        "own_text": own,
    }


if __name__ == "__main__":
    main()
