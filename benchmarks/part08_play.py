"""What the step player shows: the same twelve requests under each scheduler, step by step.

articles/figures/08_play.py writes the recording; no time is measured. The clock is the step number. The model
is a stand-in that always says token 0, because who runs when does not depend on what is said. The requests,
`play` and `steps_recording` also serve Parts 12 and 16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.part06_queue import ReadyMade
from benchmarks.part08_gantt import MODEL, Guest, name_of
from engine.cache.slots import SlotCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.models.checkpoint import resolve
from engine.models.config import ModelConfig
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.static import StaticScheduler
from engine.text.tokenizer import Tokenizer

SEATS = 4
GUESTS = (
    Guest("A", 40, 14, 0), Guest("B", 12, 20, 0), Guest("c", 6, 4, 1), Guest("d", 10, 5, 2),
    Guest("e", 8, 3, 4), Guest("F", 30, 10, 6), Guest("g", 5, 6, 7), Guest("h", 9, 4, 9),
    Guest("I", 20, 16, 12), Guest("j", 4, 3, 13), Guest("k", 12, 5, 15), Guest("l", 7, 8, 18),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One way to run the requests, as the figure offers it."""

    name: str
    words: str  # on its button
    steps: list[dict]  # as `Steps` writes them
    seats: int
    budget: int | None = None  # tokens of a step; None: no limit
    marks: tuple[int, ...] = ()  # steps before which a reader may be asked what they will do


class Steps(Listener):
    """Writes down each step: {"work": {name: [tokens computed, tokens said]}, "preempted": [name, ...]}. If
    there are drafts among the tokens computed, their number comes third.
    """

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self._requests: dict[str, Request] = {}
        self._num_said: dict[str, int] = {}
        self._preempted: list[str] = []
        self._num_rows: tuple[int, ...] = ()  # [S]: of the step that is scheduled

    def on_arrival(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._num_said[request.request_id] = 0

    def on_schedule(self, batch: Batch) -> None:
        self._num_rows = batch.rows.chosen_counts

    def on_preempt(self, request: Request) -> None:
        self._preempted.append(request.request_id)

    def on_step(self, record: StepRecord) -> None:
        if record.error is not None:
            raise RuntimeError(record.error)
        step: dict = {"work": {}}
        rows = zip(record.request_ids, record.tokens_computed, self._num_rows, strict=True)
        for sample, computed, num_rows in rows:
            name = name_of(sample)
            num_said = len(self._requests[name].output.token_ids)
            step["work"][name] = [computed, num_said - self._num_said[name]]
            if num_rows > 1:
                step["work"][name].append(num_rows - 1)
            self._num_said[name] = num_said
        if self._preempted:
            step["preempted"], self._preempted = self._preempted, []
        self.steps.append(step)


def play(engine: LLMEngine, prompts: dict[str, list[int]] | None = None) -> list[dict]:
    """Run the twelve requests to their end. `prompts` gives their token ids; by default all are token 1."""
    steps = Steps()
    engine.listeners.add(steps)
    coming = list(GUESTS)
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].after_step <= len(steps.steps):
            guest = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=guest.output, ignore_eos=True)
            prompt = prompts[guest.name] if prompts else [1] * guest.prompt
            engine.add_request(guest.name, prompt, params)
        if engine.has_unfinished_requests():
            engine.step()
        else:
            steps.steps.append({"work": {}})  # all have ended, and the next is not here yet
    return steps.steps


def stand_in(scheduler: Scheduler, max_model_len: int | None = None) -> LLMEngine:
    """An engine whose model takes no time and always says token 0."""
    tokenizer, config = Tokenizer.from_pretrained(MODEL), ModelConfig.from_pretrained(resolve(MODEL))
    runner = ModelRunner([ReadyMade(torch.zeros(len(GUESTS), config.vocab_size))])
    return LLMEngine(tokenizer, config, scheduler, runner, max_model_len=max_model_len)


def steps_recording(label: str, choice: str, runs: Sequence[Run]) -> dict:
    """What play_steps.js reads (engine/server/pages). `choice` says what differs between the runs."""
    requests = [[guest.name, guest.prompt, guest.output, guest.after_step] for guest in GUESTS]
    return {
        "view": "steps", "label": label, "choice": choice, "requests": requests,
        "runs": [vars(run) for run in runs],
    }  # fmt: skip


def recording() -> dict:
    def run(name: str, words: str, scheduler: Scheduler, seats: int, budget: int | None, *marks: int) -> Run:
        return Run(name, words, play(stand_in(scheduler)), seats, budget, marks)

    def cache() -> SlotCache:
        return SlotCache(SEATS, ModelConfig.from_pretrained(resolve(MODEL)).max_positions)

    runs = [
        run("queue", "one at a time", FIFOScheduler(cache()), 1, None, 15),
        run("static", "static batches", StaticScheduler(cache(), SEATS), SEATS, None, 3, 21),
        run("64", "continuous, budget 64", ContinuousScheduler(cache(), SEATS, 64), SEATS, 64, 2, 6, 8),
        run("16", "continuous, budget 16", ContinuousScheduler(cache(), SEATS, 16), SEATS, 16, 2, 3, 4, 10),
    ]
    return steps_recording("Twelve requests, step by step, under four schedulers", "Scheduler", runs)
