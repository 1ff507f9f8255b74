"""What the block table shows: six sequences in a small memory of pages, or of slots, step by step.

articles/figures/12_play.py and 12_pages.py write the recordings; no time is measured. The clock is the step
number. The tokens are storyteller's, so that a reader can read them; who gets which block depends on their
number alone, and on which prompts begin alike.
"""

from dataclasses import dataclass

from torch import nn

from benchmarks.part08_gantt import MODEL
from benchmarks.part08_play import Run, play, stand_in, steps_recording
from engine.cache.memory import PageMemory
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache, SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.models.loader import load_model
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request, State
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

ROOM, LONGEST = 48, 24  # tokens: of the memory, and of a sequence at most
SWAP_ROOM = 16  # tokens
SEATS, BUDGET = 5, 16
BEGINNING = "Once upon a time, there was a"


@dataclass(frozen=True)
class Teller:
    """One request of the scene."""

    name: str
    prompt: str
    output: int  # tokens
    after_step: int  # arrives when this many steps are done
    n: int = 1


SCENE = (
    Teller("a", f"{BEGINNING} girl named Lily.", 9, 0),
    Teller("b", f"{BEGINNING} dog named Max.", 12, 2),
    Teller("c", "Tom had a red ball and a", 7, 4, n=2),
    Teller("d", "One day, a big bird saw a little fish in the lake. The bird wanted to", 6, 8),
    Teller("e", f"{BEGINNING} girl named Sue.", 12, 12),
    Teller("f", "The sun was hot", 8, 14),
)


class Plans(Listener):
    """Writes down each step: who ran, and the plan of the cache behind it."""

    def __init__(self, scheduler: ContinuousScheduler) -> None:
        self.scheduler, self.cache = scheduler, scheduler.cache
        self.moments: list[dict] = []
        self.requests: dict[str, Request] = {}  # all that came, by name
        self._batch: Batch | None = None  # of the step under way
        self._preempted: list[str] = []

    def on_arrival(self, request: Request) -> None:
        self.requests[name_of(request)] = request

    def on_schedule(self, batch: Batch) -> None:
        self._batch = batch

    def on_preempt(self, request: Request) -> None:
        self._preempted.append(name_of(request))

    def on_step(self, record: StepRecord) -> None:
        if record.error is not None:
            raise RuntimeError(record.error)
        batch, names = self._batch, {request.id: name for name, request in self.requests.items()}
        tables = self._tables(batch)
        moment: dict = {
            "work": {names[i]: n for i, n in zip(batch.ids, record.tokens_computed, strict=True)},
            "sequences": {
                name_of(request): [request.num_computed_tokens, len(request.token_ids), tables[request.id]]
                for request in self.scheduler.running
            },
            "waiting": [name_of(request) for request in self.scheduler.waiting],
            "preempted": self._preempted,
            "ended": [names[i] for i in batch.ids if self.requests[names[i]].state is State.FINISHED],
        }
        self._preempted = []
        if isinstance(self.cache, PagedCache):
            moment["known"] = [
                block for block in range(self.cache.num_blocks) if block in self.cache.prefixes
            ]
            moment["swapped"] = {names[i]: swapped.blocks for i, swapped in self.cache.swap.sequences.items()}
            moment["copies"] = [[copy.kind, copy.source, copy.target] for copy in batch.copies]
        self.moments.append({key: value for key, value in moment.items() if value or key == "sequences"})

    def _tables(self, batch: Batch) -> dict[str, list[int]]:
        """Each running sequence's blocks, or its slot, by id."""
        if isinstance(self.cache, PagedCache):
            return {i: memory.table.blocks.tolist() for i, memory in self.cache.allocations.items()}
        return {i: table.tolist() for i, table in zip(batch.ids, batch.tables, strict=True)}


def name_of(request: Request) -> str:
    """The engine numbers all samples: a/0. Here only those that have siblings are numbered."""
    return request.id if request.params.n > 1 else request.request_id


def play_scene(engine: LLMEngine) -> Plans:
    """Run the scene to its end."""
    plans = Plans(engine.scheduler)
    engine.listeners.add(plans)
    coming = list(SCENE)
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].after_step <= len(plans.moments):
            teller = coming.pop(0)
            params = SamplingParams(
                temperature=0.8 if teller.n > 1 else 0, seed=1, n=teller.n, max_tokens=teller.output,
                ignore_eos=True,
            )  # fmt: skip
            engine.add_request(teller.name, teller.prompt, params)
        engine.step()
    return plans


def engine_on(model: nn.Module, memory: PageMemory | SlotMemory, cache: PagedCache | SlotCache) -> LLMEngine:
    scheduler = ContinuousScheduler(cache, SEATS, BUDGET)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    return LLMEngine(Tokenizer.from_pretrained(MODEL), model.config, scheduler, runner, max_model_len=LONGEST)


def paged(model: nn.Module, block_size: int, prefix: bool) -> LLMEngine:
    num_blocks, num_swap_blocks = ROOM // block_size, SWAP_ROOM // block_size
    memory = PageMemory(model.config, num_blocks, block_size, num_swap_blocks=num_swap_blocks)
    cache = memory.plan(enable_prefix_caching=prefix, preemption_mode="swap")
    return engine_on(model, memory, cache)


def in_slots(model: nn.Module) -> LLMEngine:
    memory = SlotMemory(model.config, ROOM // LONGEST, LONGEST)
    return engine_on(model, memory, memory.plan())


def recording() -> dict:
    """What play_blocks.js reads (engine/server/pages)."""
    model, tokenizer = load_model(MODEL), Tokenizer.from_pretrained(MODEL)
    runs, words = [], {}
    for block_size, prefix in ((4, True), (4, False), (16, True), (16, False), (LONGEST, None)):
        engine = in_slots(model) if prefix is None else paged(model, block_size, prefix)
        plans = play_scene(engine)
        runs.append({
            "memory": "slots" if prefix is None else "pages", "block_size": block_size,
            "prefix": bool(prefix), "num_blocks": ROOM // block_size, "moments": plans.moments,
        })  # fmt: skip
        said = {name: tokens_of(tokenizer, request) for name, request in plans.requests.items()}
        if words and said != words:
            raise RuntimeError(f"{block_size=}, {prefix=}: another memory, and another text: {said}")
        words = said
    return {
        "view": "blocks",
        "label": f"Six requests in a memory of {ROOM} tokens",
        "words": words,
        "runs": runs,
    }


def tokens_of(tokenizer: Tokenizer, request: Request) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in request.token_ids]


def steps_in_slots_and_pages() -> dict:
    """The step player's twelve requests in the memory of two slots: as slots, and as pages."""
    room, longest, seats, budget = 108, 54, 8, 32
    caches = {"slots": SlotCache(room // longest, longest), "pages": PagedCache(room // 4, 4, 0, False)}
    words = {"slots": "2 slots of 54 tokens", "pages": "27 pages of 4 tokens"}
    runs = [
        Run(
            name,
            words[name],
            play(stand_in(ContinuousScheduler(cache, seats, budget), longest)),
            seats,
            budget,
        )
        for name, cache in caches.items()
    ]
    return steps_recording("Twelve requests in a memory of 108 tokens, in slots and in pages", "Memory", runs)
