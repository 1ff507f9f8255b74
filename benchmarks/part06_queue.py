"""What does the engine cost beside Part 3's bare loop, and what does a queue do to those who wait?

    python -m benchmarks.part06_queue       # about a minute on a quiet machine

The same request four ways, in turns: Part 3's loop, the engine stepped by hand, and both behind an event loop
(Part 4's backend, this part's). Beside it: a step without a model, which is bookkeeping alone; a queue of
eight. Times per token are medians over the tokens of a round, and then over rounds.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from rich import print

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.cache.buffer import BufferCache, BufferMemory
from engine.cache.single import CachedForward
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.greedy import generate
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, Logits, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, Listeners, StepRecord
from engine.requests.request import Request
from engine.scheduling.fifo import FIFOScheduler
from engine.server.backend import Backend, LockedBackend
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
TOKENS, SHORT, QUEUE = 128, 32, 8
SCENE = {"A": (5, 9), "B": (3, 5), "C": (8, 6)}  # tokens of prompt and output, for the timeline
LOOP, ENGINE = "Part 3's loop", "engine, stepped by hand"
LOCKED, ASYNC = "Part 4's backend (lock, a thread hop per token)", "engine in its own thread"


class Records(Listener):
    """Keeps every step's record."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def gaps(times: list[float]) -> list[float]:
    """Milliseconds between tokens."""
    return [(b - a) * 1e3 for a, b in pairwise(times)]


def run(engine: LLMEngine, requests: int, tokens: int) -> list[list[float]]:
    """Queue equal requests and step to the end: when each one's tokens came, seconds from the start."""
    start, times = time.perf_counter(), {}
    for i in range(requests):
        engine.add_request(str(i), PROMPT, params(tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                times[output.request_id] = [at - start for at in output.stats.token_times]
    return [times[str(i)] for i in range(requests)]


async def read(backend: Backend, name: str, tokens: int) -> list[float]:
    """When each token came. The engine notes the times itself, since a reader may find several at once."""
    times = []
    async for output in await backend.generate(PROMPT, params(tokens), name):
        times.append(time.perf_counter())
        noted = output.stats.token_times if output.stats else times
    return noted


class ReadyMade:
    """A runner's way that hands out the first of `logits`[most rows of a step, V]: a model that takes no
    time.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        return Logits(self.logits[: len(batch.rows.chosen)])


class Diary(Listener):
    """By step number: when each request arrived, ran (tokens in each of its steps) and ended."""

    def __init__(self) -> None:
        self.step, self.seen = 0, {}

    def on_arrival(self, request: Request) -> None:
        self.seen[request.request_id] = {"arrived": self.step, "steps": [], "tokens": []}

    def on_schedule(self, batch: Batch) -> None:
        self.step += 1
        for s, name in enumerate(batch.ids):
            request_id = name.partition("/")[0]  # of its one sample
            self.seen[request_id]["steps"].append(self.step)
            self.seen[request_id]["tokens"].append(batch.num_new_tokens(s))

    def on_finish(self, request: Request) -> None:
        self.seen[request.request_id] |= {"ended": self.step, "reason": request.output.finish_reason}


def timeline(engine: LLMEngine, diary: Diary, leave: dict[int, str]) -> dict[str, dict]:
    """Who runs in which step, with `leave`: after so many steps, this request is aborted."""
    for name, (prompt, tokens) in SCENE.items():
        engine.add_request(name, [1] * prompt, params(tokens))
    while engine.has_unfinished_requests():
        if diary.step in leave:
            engine.abort_request(leave[diary.step])
        engine.step()
    return diary.seen


def main() -> None:
    repeats = whole_numbers(__doc__.splitlines()[0], repeats=9).repeats
    torch.set_num_threads(1)
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, transform=pack_linears)
    config = model.config

    def make_engine(*listeners: Listener) -> LLMEngine:
        memory = BufferMemory(config)
        runner = ModelRunner([EagerWay(model, memory)], memory)
        return LLMEngine(tokenizer, config, FIFOScheduler(memory.plan()), runner, Listeners(listeners))

    records = Records()
    engine = make_engine(records)

    def locked() -> LockedBackend:  # one for each event loop, as its lock belongs to one
        return LockedBackend(MODEL, tokenizer, config, lambda: CachedForward(model))

    threaded = EngineThread(make_engine(), MODEL)
    threaded.start()
    try:
        sides: dict[str, Callable[[], list[float]]] = {  # when each token came
            LOOP: lambda: (
                generate(CachedForward(model), tokenizer, config, PROMPT, params(TOKENS)).stats.token_times
            ),
            ENGINE: lambda: run(engine, 1, TOKENS)[0],
            LOCKED: lambda: asyncio.run(read(locked(), "x", TOKENS)),
            ASYNC: lambda: asyncio.run(read(threaded, "x", TOKENS)),
        }
        found_ms: dict[str, list[float]] = {name: [] for name in sides}  # per token, of each round
        for repeat in range(1 + repeats):
            for name, side in sides.items():
                found = gaps(side())
                if repeat:  # the first one warms up
                    found_ms[name].append(statistics.median(found))
    finally:
        threaded.stop()
    decode = [step for step in records.steps if step.tokens_computed == (1,)]
    queues = [run(engine, QUEUE, SHORT) for _ in range(repeats)]

    # A model that takes no time: what is left of a step is the engine's own work.
    no_model = ReadyMade(torch.zeros(1, config.vocab_size))

    def make_idle(listener: Listener) -> LLMEngine:
        scheduler, runner = FIFOScheduler(BufferCache(config.max_positions)), ModelRunner([no_model])
        return LLMEngine(tokenizer, config, scheduler, runner, Listeners([listener]))

    bare = Records()
    run(make_idle(bare), 4, 200)
    scenes = {
        name: timeline(make_idle(diary), diary, leave)
        for name, diary, leave in (("all_stay", Diary(), {}), ("two_leave", Diary(), {2: "B", 4: "A"}))
    }

    per_token = {name: statistics.median(found) for name, found in found_ms.items()}
    step_us = {
        "schedule": statistics.median(s.schedule_seconds for s in decode) * 1e6,
        "execute": statistics.median(s.execute_seconds for s in decode) * 1e6,
        "rest": statistics.median(s.end - s.start - s.schedule_seconds - s.execute_seconds for s in decode)
        * 1e6,
    }
    first, last = ([[queue[i][at] * 1e3 for queue in queues] for i in range(QUEUE)] for at in (0, -1))
    figures = {
        "ms_per_token": per_token,
        "engine_adds_us": (per_token[ENGINE] - per_token[LOOP]) * 1e3,
        "engine_adds": per_token[ENGINE] / per_token[LOOP] - 1,
        "thread_adds_us": (per_token[ASYNC] - per_token[ENGINE]) * 1e3,
        "lock_adds_us": (per_token[LOCKED] - per_token[LOOP]) * 1e3,
        "step_us": step_us,
        "bookkeeping_us": step_us["schedule"] + step_us["rest"],
        "bookkeeping_share": 1 - step_us["execute"] / sum(step_us.values()),
        "step_without_model_us": statistics.median(s.end - s.start for s in bare.steps) * 1e6,
        "queue_first_ms": list(map(statistics.median, first)),
        "queue_last_ms": list(map(statistics.median, last)),
        "rounds": {
            "ms_per_token": {name: quartiles(ms) for name, ms in found_ms.items()},
            "queue_first_ms": list(map(quartiles, first)),
            "queue_last_ms": list(map(quartiles, last)),
        },
        "timeline": scenes,
    }
    cost = {
        "columns": ["way", "ms per token", "× Part 3's loop"],
        "rows": [[name, middle(found_ms[name]), ms / per_token[LOOP]] for name, ms in per_token.items()],
    }
    queue = {
        "columns": ["place in the queue", "steps before its first", "first word, ms", "last word, ms"],
        "rows": [[i + 1, i * SHORT, middle(first[i]), middle(last[i])] for i in (0, 1, 3, 7)],
    }
    tables = {"cost": cost, "queue": queue}
    print(f"a decode step, µs: { ({k: round(v) for k, v in step_us.items()}) }")
    question = "What does the engine cost beside Part 3's loop, and what does a queue do to those who wait?"
    workload = {"model": MODEL, "prompt": PROMPT, "new_tokens": TOKENS, "short": SHORT, "queue": QUEUE,
                "repeats": repeats}  # fmt: skip
    show(record("part06_queue", question, workload, figures, tables), tables)


if __name__ == "__main__":
    main()
