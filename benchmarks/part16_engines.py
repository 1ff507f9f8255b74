"""Engines that speculate, and one that does not, composed alike: for benchmarks and demo of Part 16."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine.attention.flash import sdpa_attention
from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.speculation.capability import NgramProposer, Speculation
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT, measure
from engine.speculation.ngram import lookup
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer

TARGET, DRAFT = "storyteller", "storyteller-draft"
ROOM = 192  # tokens of each request, prompt and output
P = 16
STEP_TOKENS = 512  # the most of a step
# How stories in stories_val.txt begin: neither model was trained on these.
PROMPTS = (
    "Once upon a time, there was a grumpy old man who lived in a hotel. He didn't like to see any children",
    "Once upon a time, there was a little radio. It was very heavy.",
    "Once upon a time, there was a farmer who loved to grow corn. He had a big field",
    "One day, a giant monster attacked the country. It was so very big and strong!",
    "Once upon a time there was a green top. The green top glowed in the dark.",
    "Tom was a cat who liked to play outside. He ran, jumped and chased birds and mice.",
    "One day, a little girl named Sue found a purse on the ground. She picked it up and saw",
    "Once upon a time, there was a big whale. The whale lived in the deep blue sea.",
    "There was a woman, named Joanne, who loved to teach people. Every day, she would go to the park",
    "Once upon a time, there was a girl who was three years old. She was very happy and loved to play.",
    "One day, Sam and Lucy went for a walk. Sam brought his large toy seat",
    "Once upon a time, a daddy had a daughter. They went for a walk in the park.",
)


class Fixed(DraftLengths):
    """So many, whatever it costs and however many stand."""

    def __init__(self, most: int) -> None:
        super().__init__(most, ALWAYS_DRAFT)

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        return [min(self.max_drafts, cap) for cap in caps]


@dataclass(frozen=True)
class Models:
    tokenizer: Tokenizer
    target: nn.Module
    draft: nn.Module


def load(rows: int = 1) -> Models:
    """Both, packed for steps of so many rows."""
    pack = partial(pack_linears, rows=rows)
    return Models(
        Tokenizer.from_pretrained(TARGET), *(load_model(m, transform=pack) for m in (TARGET, DRAFT))
    )


def plain(models: Models, seats: int = 1) -> LLMEngine:
    """One token of each request per step."""
    runner = _runner(models.target, seats)
    return _engine(models, runner, _scheduler(runner, seats))


def with_draft_model(models: Models, lengths: DraftLengths, seats: int = 1) -> LLMEngine:
    """storyteller-draft proposes: a second runner, over the same plan."""
    runner, reader, draft_probs = _runner(models.target, seats), _runner(models.draft, seats), DraftProbs()
    runner.select, reader.select = RejectionSampler(draft_probs), DraftSampler(draft_probs)
    runner.before.append(lambda batch: reader.memory.apply(batch.copies))
    scheduler = _scheduler(runner, seats)
    proposer = DraftModel(reader, scheduler.cache, models.draft.config.max_positions)
    return _engine(models, runner, scheduler, [Speculation(proposer, scheduler, lengths)])


def with_ngrams(models: Models, lengths: DraftLengths, seats: int = 1) -> LLMEngine:
    """The request's own text proposes."""
    runner = _runner(models.target, seats)
    runner.select = RejectionSampler(DraftProbs())
    scheduler = _scheduler(runner, seats)
    return _engine(models, runner, scheduler, [Speculation(NgramProposer(lookup), scheduler, lengths)])


def adaptive(make: Callable[..., LLMEngine], models: Models, most: int, seats: int = 1) -> LLMEngine:
    """`make` is one of the two above; what steps cost is measured first, on an engine of its own."""
    trial = make(models, DraftLengths(most, ALWAYS_DRAFT), seats)
    step_times = measure(trial, speculation_of(trial), seats, STEP_TOKENS)
    return make(models, DraftLengths(most, step_times), seats)


def speculation_of(engine: LLMEngine) -> Speculation:
    (speculation,) = engine.capabilities
    return speculation


def _runner(model: nn.Module, seats: int) -> ModelRunner:
    blocks = seats * -(-ROOM // P)
    memory = PageMemory(model.config, blocks, P, kernel=sdpa_attention)
    last = LastTokens(seats, torch.device("cpu"))
    return ModelRunner([EagerWay(model, memory, upload=last.upload)], memory, last_tokens=last)


def _scheduler(runner: ModelRunner, seats: int) -> ContinuousScheduler:
    return ContinuousScheduler(runner.memory.plan(enable_prefix_caching=False), seats, STEP_TOKENS)


def _engine(models: Models, runner: ModelRunner, scheduler, capabilities: Sequence = ()) -> LLMEngine:
    return LLMEngine(
        models.tokenizer,
        models.target.config,
        scheduler,
        runner,
        supports=SUPPORTS,
        max_model_len=ROOM,
        capabilities=capabilities,
    )


def tell(engine: LLMEngine, prompts: Sequence[str], params: SamplingParams) -> tuple[list[list[int]], float]:
    """The token ids behind each prompt, all of them asked at once, and how long that took."""
    start, done = time.perf_counter(), {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    seconds = time.perf_counter() - start
    return [list(done[str(i)].outputs[0].token_ids) for i in range(len(prompts))], seconds


@dataclass(frozen=True)
class Seen:
    """What a step of one request was given and what came of it."""

    drafts: list[int]
    tokens: list[int]  # the drafts that stood, and one more


def watch(engine: LLMEngine) -> list[Seen]:
    """A list that grows with each step of an engine that speculates for one request."""
    seen, speculation = [], speculation_of(engine)
    landed = speculation.after_result

    def watched(step, result):
        drafts = list(step.requests[0].draft_ids)
        found = landed(step, result)
        seen.append(Seen(drafts, found.tokens[0]))
        return found

    speculation.after_result = watched
    return seen
