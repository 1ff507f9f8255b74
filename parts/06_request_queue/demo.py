"""Three clients, one model, one queue: who waits, who runs, who leaves, who fails, and in which step.

python -m parts run 6                               # ends by itself
python -m parts run 6 -- --steps                    # no server: a few steps, one by one (the first sitting)
python -m parts run 6 -- --serve [--port 8000]      # serves until Ctrl-C, for three curls at once
"""

import argparse
import json
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import uvicorn
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.buffer import BufferMemory  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.core.engine_thread import EngineThread  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.greedy import generate  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.execution.runner import EagerWay, Logits, ModelRunner, Way  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.requests.batch import Batch  # noqa: E402
from engine.requests.listeners import Listener, Listeners, StepRecord  # noqa: E402
from engine.requests.request import Request  # noqa: E402
from engine.scheduling.fifo import FIFOScheduler  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import HOST, served, title, yes  # noqa: E402

MODEL = "storyteller"
PROMPTS = {
    "A": "Once upon a time, there was a little dog named Max. Max had a red ball",
    "B": "Lily and Tom went to the park. They saw a big slide",
    "C": "One day, a small robot found a key in the garden",
}
COLOURS = {"A": "cyan", "B": "magenta", "C": "yellow"}
TOKENS = {"A": 120, "B": 60, "C": 90}
FEW = {"A": 4, "B": 3, "C": 3}  # tokens for --steps
BRAKE = 0.012  # seconds added to each step that is on show: this model is too quick for the eye
LINES, WIDTH = 8, 50  # lines of a story on show, columns of a timeline
ENDS = {"stop": "●", "length": "●", "abort": "×", "error": "!"}


class Diary(Listener):
    """Names requests A, B, C in order of arrival, and notes the step of all that happens to them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # request id -> name
        self.arrived: dict[str, int] = {}  # name -> steps done by then
        self.ran: dict[str, list[int]] = {}  # name -> numbers of its steps, from 1
        self.ended: dict[str, tuple[int, str]] = {}  # name -> (steps done by then, finish reason)
        self.order: list[str] = []  # names as they ended
        self.records: list[StepRecord] = []
        self._steps = 0

    def on_arrival(self, request: Request) -> None:
        name = list(PROMPTS)[len(self.names)]
        self.names[request.id], self.arrived[name], self.ran[name] = name, self._steps, []

    def on_schedule(self, batch: Batch) -> None:
        self._steps += 1  # counted here, so that a step that fails has its number too
        for request_id in batch.ids:
            self.ran[self.names[request_id]].append(self._steps)

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_finish(self, request: Request) -> None:
        name = self.names[request.id]
        self.ended[name] = (self._steps, request.output.finish_reason)
        self.order.append(name)

    def state(self, name: str) -> str:
        if name in self.ended:
            return {"abort": "aborted", "error": "failed"}.get(self.ended[name][1], "finished")
        return "running" if self.ran.get(name) else "waiting" if name in self.arrived else "not here yet"

    def summary(self) -> dict:
        """Arrival, first step and end of each request, by step number."""
        return {
            name: {
                "arrived_after_step": self.arrived[name],
                "first_step": steps[0] if steps else None,
                "steps": len(steps),
                "ended_after_step": self.ended[name][0],
                "finish_reason": self.ended[name][1],
            }
            for name, steps in self.ran.items()
        }


class Breakable:
    """A way to compute a pass, with a brake, and a fuse: it fails once, so many steps after it was lit."""

    def __init__(self, way: Way, brake: float) -> None:
        self.way, self.brake, self.fuse = way, brake, 0

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def __call__(self, batch: Batch) -> Logits:
        time.sleep(self.brake)
        self.fuse -= 1
        if self.fuse == 0:
            raise RuntimeError("a cosmic ray hit the adder")
        return self.way(batch)


@dataclass
class Stage:
    """A server, and the engine behind it that the demo may look at."""

    address: str
    engine: LLMEngine
    way: Breakable
    diary: Diary


class Client(threading.Thread):
    """Streams one completion over HTTP. With `leave`, it hangs up as soon as that is true."""

    def __init__(self, stage: Stage, name: str, leave: Callable[["Client"], bool] | None = None) -> None:
        super().__init__(daemon=True)
        self.address, self.prompt_name, self.leave = stage.address, name, leave
        self.text, self.pieces, self.error = "", 0, None
        self.start()
        wait_until(lambda: name in stage.diary.arrived)  # so that the order of arrival is A, B, C

    def run(self) -> None:
        body = {
            "model": MODEL, "prompt": PROMPTS[self.prompt_name], "max_tokens": TOKENS[self.prompt_name],
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self.address}/v1/completions", json=body, timeout=60) as response:
            if self.leave and self.prompt_name != "A":  # it sees no words yet: it is in the queue
                return wait_until(lambda: self.leave(self))
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))
                if self.leave and self.leave(self):
                    return None

    def take(self, chunk: dict) -> None:
        self.error = chunk.get("error", self.error)
        self.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
        self.pieces += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", action="store_true", help="a few steps by hand, without a server")
    parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C instead of the tour")
    parser.add_argument("--port", type=int, default=8000, help="for --serve")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, transform=pack_linears)

    def compose(brake: float, *listeners: Listener) -> tuple[LLMEngine, Breakable]:
        """The engine from its parts."""
        memory = BufferMemory(model.config)
        way = Breakable(EagerWay(model, memory), brake)
        scheduler, runner = FIFOScheduler(memory.plan()), ModelRunner([way], memory)
        return LLMEngine(tokenizer, model.config, scheduler, runner, Listeners(listeners)), way

    if arguments.steps:
        step_by_step(console, *compose(0.0))
        return
    if arguments.serve:
        app = create_app(EngineThread(compose(BRAKE)[0], MODEL))  # the app starts and stops its thread
        console.print(how_to_call(arguments.port), soft_wrap=True)
        uvicorn.run(app, host=HOST, port=arguments.port, log_level="warning")
        return

    @contextmanager
    def stage() -> Iterator[Stage]:
        diary = Diary()
        engine, way = compose(BRAKE, diary)
        with served(create_app(EngineThread(engine, MODEL))) as address:
            yield Stage(address, engine, way, diary)

    alone = {
        name: generate(CachedForward(model), tokenizer, model.config, prompt, params(name)).outputs[0].text
        for name, prompt in PROMPTS.items()
    }
    scenes = {}
    title(console, "1. Three clients at once, first in, first out")
    with stage() as here:
        scenes["fifo"] = three_at_once(console, here, alone)
    title(console, "2. B gives up in the queue, A hangs up in mid-story")
    with stage() as here:
        scenes["leaving"] = two_leave(console, here, alone)
    title(console, "3. A step fails")
    with stage() as here:
        scenes["failing"] = a_step_fails(console, here, alone)
    title(console, "4. What the engine costs, without the brake")
    diary = Diary()
    cost = what_it_costs(console, compose(0.0, diary)[0], diary)

    workload = {"model": MODEL, "prompts": PROMPTS, "tokens": TOKENS}
    figures = {"scenes": scenes, "decode_step_us": cost}
    path = record("part06", "Who runs in which step of a queue?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def step_by_step(console: Console, engine: LLMEngine, way: Breakable) -> None:
    """A row per step: what was known and computed before it, and what came out of it. B leaves, and a step
    fails.
    """
    for name, prompt in PROMPTS.items():
        few = SamplingParams(temperature=0, max_tokens=FEW[name], ignore_eos=True)
        engine.add_request(name, prompt, few)
    requests = list(engine.scheduler.waiting)
    way.fuse = 6
    table = Table("step", *(f"{name}: known − computed" for name in PROMPTS), "what came out", box=None)
    number = 0
    while engine.has_unfinished_requests():
        number += 1
        if number == 3:
            engine.abort_request("B")
        step = engine.launch()
        assert step is not None  # somebody waits or runs, and the cache has room for one
        cells = []
        for request in requests:
            known, computed = len(request.token_ids), request.num_computed_tokens
            if request in step.requests:
                new = step.batch.num_new_tokens(step.requests.index(request))
                cells.append(f"[bold]{known} − {computed - new} = {new}[/]")
            else:
                cells.append(f"[dim]{request.output.finish_reason or 'waits'}[/]")
        (output,) = engine.land(step)
        came_out = output.error or repr(output.outputs[0].text)
        table.add_row(str(number), *cells, f"{output.request_id}: {came_out}")
    console.print(table)
    console.print(
        "\nB left before step 3, in the queue. Step 6 failed: C ended with the reason, and nobody else did.\n"
        "To compute is what is known and not computed: a prompt first, then a token a step."
    )


def three_at_once(console: Console, stage: Stage, alone: dict[str, str]) -> dict:
    console.print(f"Each step is slowed by {BRAKE * 1e3:.0f} ms, so that you can watch.\n")
    clients = {}
    with Live(console=console, refresh_per_second=12) as live:
        for name in PROMPTS:
            clients[name] = Client(stage, name)
            live.update(panels(console, clients, stage.diary))
        while any(client.is_alive() for client in clients.values()):
            live.update(panels(console, clients, stage.diary))
            time.sleep(0.05)
        live.update(panels(console, clients, stage.diary))
    console.print()
    console.print(timeline(stage.diary))
    same = all(client.text == alone[name] for name, client in clients.items())
    waited = stage.diary.ran["C"][0] - stage.diary.arrived["C"] - 1
    console.print(
        f"Finished in the order [bold]{', '.join(stage.diary.order)}[/], each with the text of Part 3's loop "
        f"alone: [bold]{yes(same)}[/].\nC waited [bold]{waited}[/] steps for its first word. "
        "Fair, and slow: Parts 7 and 8 let them share the steps."
    )
    return stage.diary.summary() | {"same_text": same}


def two_leave(console: Console, stage: Stage, alone: dict[str, str]) -> dict:
    diary = stage.diary
    a = Client(stage, "A", leave=lambda client: client.pieces >= 20)
    b = Client(stage, "B", leave=lambda _: len(diary.ran["A"]) >= 10)
    c = Client(stage, "C")
    for client in (a, b, c):
        client.join()
    wait_until(lambda: not stage.engine.has_unfinished_requests())
    console.print(timeline(diary))
    usage = stage.engine.scheduler.cache.usage()
    console.print(
        f"A read {a.pieces} pieces and left; its request ran {len(diary.ran['A'])} steps of {TOKENS['A']}. "
        f"B ran {len(diary.ran['B'])}.\nC got its whole story: [bold]{yes(c.text == alone['C'])}[/]. "
        f"Sequences in the cache now: [bold]{usage.num_sequences}[/]."
    )
    return diary.summary() | {"same_text": c.text == alone["C"], "sequences_held": usage.num_sequences}


def a_step_fails(console: Console, stage: Stage, alone: dict[str, str]) -> dict:
    logging.getLogger("engine").setLevel(logging.CRITICAL)  # the server logs the failure; here it is the show
    stage.way.fuse = 30
    clients = {name: Client(stage, name) for name in PROMPTS}
    for client in clients.values():
        client.join()
    a = clients["A"]
    console.print(timeline(stage.diary))
    console.print(f"A's stream, after {a.pieces - 1} pieces, ends with this event:\n")
    console.print(Panel(Text(json.dumps({"error": a.error}, indent=2)), border_style="red"))
    same = all(clients[name].text == alone[name] for name in "BC")
    health = httpx.get(f"{stage.address}/health").json()
    console.print(f"B and C got their whole stories: [bold]{yes(same)}[/]. GET /health: {json.dumps(health)}")
    return stage.diary.summary() | {"same_text": same, "error": a.error}


def what_it_costs(console: Console, engine: LLMEngine, diary: Diary) -> dict[str, float]:
    """The same three requests, stepped by hand in this thread: microseconds of a decode step."""
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params(name))
    while engine.has_unfinished_requests():
        engine.step()
    steps = [step for step in diary.records if step.tokens_computed == (1,)]
    parts = {
        "schedule: who runs, and with which tokens": [step.schedule_seconds for step in steps],
        "execute: forward pass and choice of the token": [step.execute_seconds for step in steps],
        "the rest: stop checks, text, queues, outputs": [
            step.end - step.start - step.schedule_seconds - step.execute_seconds for step in steps
        ],
    }
    micros = {name: statistics.median(seconds) * 1e6 for name, seconds in parts.items()}
    table = Table("part of a decode step", "µs", "share", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, us in micros.items():
        table.add_row(name, f"{us:.0f}", f"{us / sum(micros.values()):.1%}")
    console.print(table)
    return {name.partition(":")[0]: us for name, us in micros.items()}


def panels(console: Console, clients: dict[str, Client], diary: Diary) -> Table:
    """What each client sees, side by side, and what the engine says of its request."""
    table = Table.grid(expand=True)
    for _ in PROMPTS:
        table.add_column(ratio=1)
    row = []
    for name, colour in COLOURS.items():
        client = clients.get(name)
        lines = Text(client.text if client else "").wrap(console, console.width // 3 - 4)[-LINES:]
        style = colour if diary.state(name) == "running" else "dim"
        title = f"{name} {diary.state(name)}, {client.pieces if client else 0} pieces"
        row.append(Panel(Text("\n").join(lines), title=title, height=LINES + 2, border_style=style))
    table.add_row(*row)
    return table


def timeline(diary: Diary) -> Table:
    """A row for each request, steps from left to right: · waiting, █ running, and how it ended."""
    steps = max(number for number, _ in diary.ended.values())
    scale = max(1, -(-steps // WIDTH))  # steps per column
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    for name, colour in COLOURS.items():
        ran, (end, reason) = diary.ran[name], diary.ended[name]
        row = Text(" " * (diary.arrived[name] // scale))
        for column in range(diary.arrived[name] // scale, -(-end // scale)):
            here = any(column * scale < number <= (column + 1) * scale for number in ran)
            row.append("█" if here else "·", style=colour)
        row.append(ENDS[reason], style="bold red" if reason in ("abort", "error") else f"bold {colour}")
        told = f"{diary.state(name)} {'after' if reason == 'abort' else 'in'} step {end}"
        table.add_row(f"[bold]{name}[/]", row, f"[dim]{told}[/]")
    table.add_row("", f"[dim]steps 1 to {steps}, {scale} to a column; · waiting  █ running[/]", "")
    return table


def params(name: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS[name], ignore_eos=True)


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {seconds:.0f} seconds")
        time.sleep(0.002)


def how_to_call(port: int) -> str:
    head = f"curl -sN http://{HOST}:{port}/v1/completions -H 'Content-Type: application/json' -d"
    bodies = [{"model": MODEL, "prompt": p, "max_tokens": 30, "stream": True} for p in PROMPTS.values()]
    calls = "\n".join(f"{head} '{json.dumps(body)}' &" for body in bodies)
    return f"Serving {MODEL} on http://{HOST}:{port} until Ctrl-C. In another terminal:\n\n{calls}\nwait\n"


if __name__ == "__main__":
    main()
