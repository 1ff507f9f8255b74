"""A decoding crowd, with a listener and without, in turns: what `part11_cost` and `part11_trace` measure.

One engine takes turns: WINDOW steps without its listeners, WINDOW with them, and so on. Processor time of
each window, of all threads. A step takes longer the more tokens are held, so a window with listeners is
compared with the mean of the one before it and the one behind it; a round's cost is the median of these
differences. Beside it, the time inside the listener alone, which other people's work disturbs least.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.record import middle, quartiles
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.listeners import Listener, Listeners, StepRecord
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
PROMPT = [300] * 16
TOKENS = 240
WINDOW = 10  # steps
INSIDE = "inside the listener, by its own clock"


def engine_for(tokenizer: Tokenizer, model, sequences: int) -> LLMEngine:
    """An engine for so many requests that all decode at once. It has none yet: a listener comes first."""
    memory = SlotMemory(model.config, sequences)
    scheduler = ContinuousScheduler(memory.plan(), sequences, sequences * len(PROMPT))
    return LLMEngine(tokenizer, model.config, scheduler, ModelRunner([EagerWay(model, memory)], memory))


def seconds_inside(listener: Listener) -> list[float]:
    """The list to which each `on_step` of the listener adds its seconds from now on."""
    seconds, on_step = [], listener.on_step

    def timed(record: StepRecord) -> None:
        start = time.perf_counter()
        on_step(record)
        seconds.append(time.perf_counter() - start)

    listener.on_step = timed  # `Listeners.tell` looks it up at each call
    return seconds


def take_turns(engine: LLMEngine, sequences: int) -> tuple[list[float], list[float]]:
    """Processor seconds per step of each window with the engine's listeners, and beside each the mean of the
    two without that stand around it.
    """
    scheduler, listening, silent = engine.scheduler, engine.listeners, Listeners()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(sequences):
        engine.add_request(str(i), PROMPT, params)
    for _ in range(WINDOW):
        engine.step()
    seconds: dict[Listeners, list[float]] = {listening: [], silent: []}
    turns = (TOKENS - 3 * WINDOW) // (2 * WINDOW)
    for listeners in [silent, *[listening, silent] * turns]:
        engine.listeners = scheduler.listeners = listeners
        start = time.process_time()
        for _ in range(WINDOW):
            engine.step()
        seconds[listeners].append((time.process_time() - start) / WINDOW)
    engine.listeners = scheduler.listeners = listening
    while engine.has_unfinished_requests():
        engine.step()
    around = [statistics.mean(neighbours) for neighbours in pairwise(seconds[silent])]
    return seconds[listening], around


def workload(sequences: int, rounds: int) -> dict[str, str | int]:
    """What a record says of these measurements."""
    return {"model": MODEL, "sequences": sequences, "tokens": TOKENS, "rounds": rounds, "window": WINDOW}


@dataclass
class Costs:
    """What was measured, by round. Milliseconds, and shares of a step that nobody listens to."""

    step_ms: list[float] = field(default_factory=list)
    difference_ms: list[float] = field(default_factory=list)
    listener_ms: list[float] = field(default_factory=list)

    def add(self, listening: Sequence[float], silent: Sequence[float], inside: Sequence[float]) -> None:
        """One round, in seconds: of its windows, and inside the listener."""
        self.step_ms.append(statistics.median(silent) * 1e3)
        differences = [a - b for a, b in zip(listening, silent, strict=True)]
        self.difference_ms.append(statistics.median(differences) * 1e3)
        self.listener_ms.append(statistics.median(inside) * 1e3)

    def figures(self) -> dict:
        """Medians of the rounds, and their quartiles."""
        kept = {name: quartiles(values) for name, values in vars(self).items()}
        step, difference, listener = (of["median"] for of in kept.values())
        return {
            "step_ms": step,
            "difference_ms": difference,
            "difference_share": difference / step,
            "listener_ms": listener,
            "listener_share": listener / step,
            "rounds": kept,
        }

    def rows(self, silent: str, more: str) -> list[list]:
        """Of a table: what, ms, share of a step."""
        figures = self.figures()
        return [
            [silent, middle(self.step_ms), None],
            [more, middle(self.difference_ms), f"{figures['difference_share']:.1%}"],
            [INSIDE, middle(self.listener_ms), f"{figures['listener_share']:.1%}"],
        ]
