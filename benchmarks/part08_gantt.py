"""Who runs in which step, with two long and three short requests, three schedulers, and too little memory?

    python -m benchmarks.part08_gantt       # seconds: it counts steps and tokens, and no time

The clock is the step number. The model is a stand-in that always says token 0, because who runs when does not
depend on what is said. `play`, the scene and the tight cache also serve Part 8's demo, with the real model.
Beside the scene, one request speaks, another brings a long prompt, and the budget goes from small to large.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import print
from rich.table import Table

from benchmarks.part06_queue import ReadyMade
from benchmarks.record import record
from engine.cache.manager import CachedSequence
from engine.cache.slots import SlotCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import Executor, ModelRunner
from engine.models.checkpoint import resolve
from engine.models.config import ModelConfig
from engine.requests.listeners import Listener, Listeners, StepRecord
from engine.requests.request import Request
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.static import StaticScheduler
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
WIDTH, BUDGET = 3, 16  # requests at once, tokens per step
ROOM = 72  # tokens, in the cache that is too small
LONG_PROMPT, BUDGETS = 900, (16, 32, 64, 128, 256, 512, 1024)  # tokens


@dataclass(frozen=True)
class Guest:
    """One request of the scene; lengths in tokens."""

    name: str
    prompt: int
    output: int
    after_step: int  # arrives when this many steps are done


SCENE = (
    Guest("A", 40, 24, 0),
    Guest("B", 12, 28, 0),
    Guest("c", 6, 4, 4),
    Guest("d", 10, 4, 8),
    Guest("e", 8, 5, 9),
)
SHORT = tuple(guest for guest in SCENE if guest.name.islower())


def schedulers(width: int = WIDTH, budget: int = BUDGET) -> dict[str, Callable[[SlotCache], Scheduler]]:
    """The three by name, for `width` requests at once and `budget` tokens in a step."""
    return {
        "FIFO": FIFOScheduler,
        "static batches": lambda cache: StaticScheduler(cache, width),
        "continuous": lambda cache: ContinuousScheduler(cache, width, budget),
    }


class TightCache(SlotCache):
    """Slots that together may hold only `room` tokens: a stand-in for memory that runs out."""

    def __init__(self, num_slots: int, room: int) -> None:
        super().__init__(num_slots, slot_tokens=room)
        self.room, self.held = room, {}

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        more = max(num_tokens - self.held.get(seq.id, 0), 0)  # beyond what it has
        if sum(self.held.values()) + more > self.room:
            return False
        self.held[seq.id] = self.held.get(seq.id, 0) + more
        return True

    def release(self, seq: CachedSequence) -> None:
        self.held.pop(seq.id, None)
        super().release(seq)

    preempt = release


class HastyCache(TightCache):
    """A mistake: lets a newcomer in when there is room for its first chunk, whatever the scheduler asks."""

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        new = seq.id not in self.held
        return super().reserve(seq, min(num_tokens, BUDGET - 1) if new else num_tokens)


@dataclass
class Played(Listener):
    """What happened, step by step."""

    steps: list[dict[str, int]] = field(default_factory=list)  # [step]: name -> tokens computed in it
    held: list[dict[str, int]] = field(default_factory=list)  # [step]: name -> tokens in the cache after it
    outputs: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[tuple[str, int]] = field(default_factory=list)  # name, tokens that were lost
    _computed: dict[str, int] = field(default_factory=dict)

    def on_step(self, record: StepRecord) -> None:
        names = [name_of(request_id) for request_id in record.request_ids]
        self.steps.append(dict(zip(names, record.tokens_computed, strict=True)))
        self.held.append(dict(zip(names, record.tokens_held, strict=True)))
        self._computed |= self.held[-1]

    def on_preempt(self, request: Request) -> None:
        name = name_of(request.id)
        self.preempted.append((name, self._computed.pop(name, 0)))

    def ran(self, name: str) -> list[int]:
        """The steps it ran in, the first step of all being 1."""
        return [number for number, step in enumerate(self.steps, 1) if name in step]

    def latency(self, guest: Guest) -> int:
        """Steps from arrival to the last token."""
        return self.ran(guest.name)[-1] - guest.after_step

    def first(self, guest: Guest) -> int:
        """Steps from arrival to the first output token: the step that ends the prompt."""
        read = 0
        for number in self.ran(guest.name):
            read += self.steps[number - 1][guest.name]
            if read >= guest.prompt:
                return number - guest.after_step
        raise ValueError(f"{guest.name}: {read} of {guest.prompt} prompt tokens were computed")


def name_of(request_id: str) -> str:
    """The engine numbers a request's samples: A/0."""
    return request_id.partition("/")[0]


def play(
    tokenizer: Tokenizer,
    config: ModelConfig,
    scheduler: Scheduler,
    executor: Executor,
    prompts: dict[str, list[int]] | None = None,
    max_model_len: int | None = None,
) -> Played:
    """Run the scene to its end. `prompts` gives each guest's token ids; default: its length of some token."""
    played = Played()
    listeners = Listeners([played])
    if isinstance(scheduler, ContinuousScheduler):
        scheduler.listeners = listeners  # it tells of preemptions
    engine = LLMEngine(tokenizer, config, scheduler, executor, listeners, max_model_len=max_model_len)
    coming = list(SCENE)
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].after_step <= len(played.steps):
            guest = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=guest.output, ignore_eos=True)
            prompt = prompts[guest.name] if prompts else [1] * guest.prompt
            engine.add_request(guest.name, prompt, params)
        for output in engine.step():
            played.outputs[output.request_id] = output.outputs[0].token_ids
    return played


def budget_trade(tokenizer: Tokenizer, config: ModelConfig, executor: Executor) -> list[dict[str, int]]:
    """For each of BUDGETS: one request speaks, and after ten steps a prompt of LONG_PROMPT tokens comes."""
    found = []
    for budget in BUDGETS:
        played = Played()
        scheduler = ContinuousScheduler(SlotCache(2, config.max_positions), 2, budget)
        engine = LLMEngine(tokenizer, config, scheduler, executor, Listeners([played]))
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        engine.add_request("speaks", [1] * 8, params)
        while len(played.steps) < 10:
            engine.step()
        engine.add_request(
            "long", [1] * LONG_PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        )
        while engine.has_unfinished_requests():
            engine.step()
        found.append(
            {
                "budget": budget,
                "longest_step": max(sum(step.values()) for step in played.steps),
                "first_word": len(played.ran("long")),
            }
        )
    return found


def main() -> None:
    tokenizer, config = Tokenizer.from_pretrained(MODEL), ModelConfig.from_pretrained(resolve(MODEL))

    says_nothing = ModelRunner([ReadyMade(torch.zeros(WIDTH, config.vocab_size))])
    columns = ["scheduler", "steps in all", "largest step, tokens", "short ones: first token after, steps",
               "short ones: finished after, steps"]  # fmt: skip
    rows, runs = [], {}
    figures: dict[str, Any] = {}
    for name, make in schedulers().items():
        played = play(tokenizer, config, make(SlotCache(WIDTH, config.max_positions)), says_nothing)
        first = statistics.fmean(map(played.first, SHORT))
        last = statistics.fmean(map(played.latency, SHORT))
        largest = max(sum(step.values()) for step in played.steps)
        rows.append([name, len(played.steps), largest, first, last])
        runs[name] = played.steps
        figures[name.split()[0]] = {
            "steps": len(played.steps), "largest": largest, "short_first": first, "short_last": last,
            "latency": {guest.name: played.latency(guest) for guest in SCENE},
        }  # fmt: skip
    for name, kind in {"patient": TightCache, "hasty": HastyCache}.items():
        scheduler = ContinuousScheduler(kind(WIDTH, ROOM), WIDTH, BUDGET)
        played = play(tokenizer, config, scheduler, says_nothing, max_model_len=ROOM)
        figures[name] = {
            "steps": len(played.steps), "held": played.held, "preemptions": len(played.preempted),
            "lost": sum(tokens for _, tokens in played.preempted),
        }  # fmt: skip
        print(f"room for {ROOM} tokens, {name}: {len(played.steps)} steps, given up: {played.preempted}")
    figures["budgets"] = budget_trade(tokenizer, config, says_nothing)
    shown = Table(*columns)
    for row in rows:
        shown.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    print(shown)
    scene = [[guest.name, guest.prompt, guest.output, guest.after_step] for guest in SCENE]
    print(
        record(
            "part08_gantt",
            "Who runs in which step, when two long and three short requests meet three schedulers?",
            {
                "max_num_seqs": WIDTH,
                "max_num_batched_tokens": BUDGET,
                "room": ROOM,
                "scene": scene,
                "long_prompt": LONG_PROMPT,
            },
            figures | {"runs": runs},
            {
                "race": {"columns": columns, "rows": rows},
                "budgets": {
                    "columns": [
                        "tokens in a step, at most",
                        "longest step, tokens",
                        "the prompt's first word, steps",
                    ],
                    "rows": [list(entry.values()) for entry in figures["budgets"]],
                },
            },
        )
    )


if __name__ == "__main__":
    main()
