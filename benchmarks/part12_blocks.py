"""Whose is which block, step by step: twenty requests in the memory of five contiguous ones, and what is
wasted?

    python -m benchmarks.part12_blocks       # seconds: it counts steps, blocks and tokens, and no time

The clock is the step number. The model is a stand-in that always says token 7, because who gets which block
does not depend on what is said. `play` and the scene also serve Part 12's demo, with the real model.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import Executor, Logits, ModelRunner
from engine.models.checkpoint import resolve
from engine.models.config import ModelConfig
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, Listeners
from engine.requests.request import Request
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
REQUESTS, CONTIGUOUS, BLOCK, BUDGET = 20, 5, 16, 512
FREE, KEPT, SHARED = -1, -2, -3  # in a map: nobody's; nobody's, but still to be found; of several


class Seven:
    """A model that always says token 7."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = torch.zeros(BUDGET, vocab_size)
        self.logits[:, 7] = 1

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        return Logits(self.logits[: len(batch.rows.chosen)])


def lengths(seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request."""
    random = Random(seed)
    return [(random.randint(120, 320), random.randint(80, 160)) for _ in range(REQUESTS)]


@dataclass
class Played(Listener):
    """What happened, step by step."""

    cache: PagedCache | SlotCache
    running: list[Request] = field(default_factory=list)  # the scheduler's own list
    maps: list[list[int]] = field(default_factory=list)  # [step][block]: the number of its owner
    slots: list[list[tuple[int, int]]] = field(default_factory=list)  # [step][slot]: owner, tokens in it
    held: list[int] = field(default_factory=list)  # [step]: tokens that memory is set aside for
    known: list[int] = field(default_factory=list)  # [step]: tokens of those who run
    at_once: list[int] = field(default_factory=list)  # [step]: requests running
    preempted: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    errors: int = 0

    def on_schedule(self, batch: Batch) -> None:
        self.held.append(self.cache.usage().tokens_held)
        self.known.append(sum(len(request.token_ids) for request in self.running))
        self.at_once.append(len(self.running))
        if isinstance(self.cache, PagedCache):
            self.maps.append(owners(self.cache))
        else:
            self.slots.append(self.slot_owners(self.cache))

    def slot_owners(self, cache: SlotCache) -> list[tuple[int, int]]:
        """Of each slot: the number of its request, or FREE, and how many tokens of it are known."""
        owner = [(FREE, 0)] * cache.num_slots
        for request in self.running:
            owner[cache.slot_of[request.id]] = int(request.id.split("/")[0]), len(request.token_ids)
        return owner

    def on_preempt(self, request: Request) -> None:
        self.preempted += 1

    @property
    def waste(self) -> float:
        """Of the memory that was set aside, over all steps, the share that held no token."""
        return 1 - sum(self.known) / sum(self.held)


def owners(cache: PagedCache) -> list[int]:
    """Of each block."""
    owner = [KEPT if block in cache.prefixes else FREE for block in range(cache.num_blocks)]
    for seq_id, allocation in cache.allocations.items():
        for block in allocation.table.blocks.tolist():
            owner[block] = SHARED if cache.blocks.references[block] > 1 else int(seq_id.split("/")[0])
    return owner


def play(
    tokenizer: Tokenizer,
    config: ModelConfig,
    cache: PagedCache | SlotCache,
    executor: Executor,
    prompts: list[list[int]],
    outputs: list[int],
    seats: int = REQUESTS,
    watch=lambda played: None,
) -> Played:
    """Every request, greedy, all at once; `watch` is called after each step."""
    scheduler = ContinuousScheduler(cache, seats, BUDGET)
    played = Played(cache, scheduler.running)
    engine = LLMEngine(tokenizer, config, scheduler, executor, Listeners([played]))
    for i, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                played.errors += output.error is not None
                played.outputs[output.request_id] = output.outputs[0].token_ids
        watch(played)
    return played


def row(name: str, played: Played) -> list:
    mean = sum(played.at_once) / len(played.at_once)
    return [name, len(played.maps or played.held), mean, max(played.at_once), played.waste, played.preempted]


def main() -> None:
    tokenizer, config = Tokenizer.from_pretrained(MODEL), ModelConfig.from_pretrained(resolve(MODEL))
    asked = lengths()
    prompts = [[100 + i] + [11] * (prompt - 1) for i, (prompt, _) in enumerate(asked)]
    outputs = [output for _, output in asked]
    runner = ModelRunner([Seven(config.vocab_size)])
    blocks = CONTIGUOUS * config.max_positions // BLOCK
    paged = play(tokenizer, config, PagedCache(blocks, BLOCK), runner, prompts, outputs)
    slots = play(tokenizer, config, SlotCache(CONTIGUOUS, config.max_positions), runner, prompts, outputs)
    columns = [
        "cache",
        "steps",
        "requests in a step, mean",
        "most",
        "of the memory set aside, unused",
        "preemptions",
    ]
    rows = [row(f"{CONTIGUOUS} contiguous slots", slots), row(f"{blocks} blocks of {BLOCK} tokens", paged)]
    for figures in rows:
        print(
            "{:26} {:5} steps, {:4.1f} requests a step, at most {}, waste {:.1%}, {} preemptions".format(
                *figures
            )
        )
    record(
        "part12_blocks",
        __doc__.splitlines()[0],
        {"requests": REQUESTS, "prompt_tokens": "120 to 320", "output_tokens": "80 to 160", "blocks": blocks,
         "block_size": BLOCK, "max_num_batched_tokens": BUDGET, "max_model_len": config.max_positions},
        {"waste": {"slots": slots.waste, "paged": paged.waste}, "failed": slots.errors + paged.errors,
         "steps": {"slots": len(slots.held), "paged": len(paged.held)},
         "most": {"slots": max(slots.at_once), "paged": max(paged.at_once)}, "preempted": paged.preempted,
         "tokens": {"known": paged.known, "paged": paged.held, "slots_known": slots.known,
                    "slots": slots.held},
         "map": [",".join(map(str, owner)) for owner in paged.maps[::2]],
         "slots_map": [",".join(f"{owner}:{tokens}" for owner, tokens in step) for step in slots.slots[::2]]},
        {"waste": {"columns": columns, "rows": [[*row[:4], f"{row[4]:.1%}", row[5]] for row in rows]}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
