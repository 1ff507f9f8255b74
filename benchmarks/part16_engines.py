"""Engines that speculate, and one that does not, composed alike: for benchmarks and demo of Part 16."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from engine.attention.flash import sdpa_attention
from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.executor import ModelForward
from engine.layers.packed_linear import pack_linears
from engine.listeners import Listeners
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import Lookup, Proposer, SpeculativeExecutor
from engine.speculation.lengths import Lengths
from engine.speculation.ngram import lookup
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from engine.tokenizer import Tokenizer

TARGET, DRAFT = "storyteller", "storyteller-draft"
ROOM = 192  # tokens of each request, prompt and output
P = 16
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


class Fixed(Lengths):
    """So many, whatever it costs."""

    def asks(self, people: int) -> bool:
        return True

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        return [min(self.most, cap) for cap in caps]


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
    cache = _cache(models.target, seats)
    executor = ScoringExecutor(ModelForward(models.target, cache), models.tokenizer)
    return _engine(models, cache, executor, seats)


def with_draft_model(models: Models, lengths: Lengths, seats: int = 1) -> LLMEngine:
    """storyteller-draft proposes."""
    cache = PairedCache(_cache(models.target, seats), _cache(models.draft, seats))
    proposer = DraftModel(models.draft, cache)
    return _speculating(models, cache, proposer, Verifier(proposer.probs), lengths, seats)


def with_ngrams(models: Models, lengths: Lengths, seats: int = 1) -> LLMEngine:
    """The request's own text proposes."""
    cache = _cache(models.target, seats)
    return _speculating(models, cache, Lookup(lookup), Verifier({}), lengths, seats)


def _cache(model: nn.Module, seats: int) -> PagedCache:
    blocks = seats * -(-ROOM // P)
    return PagedCache(model.config, blocks, P, kernel=sdpa_attention, enable_prefix_caching=False)


def _speculating(
    models: Models,
    cache: PagedCache | PairedCache,
    proposer: Proposer,
    verifier: Verifier,
    lengths: Lengths,
    seats: int,
) -> LLMEngine:
    inner = ScoringExecutor(ModelForward(models.target, cache), models.tokenizer, verifier)
    executor = SpeculativeExecutor(inner, cache, proposer, lengths, time.thread_time)
    return _engine(models, cache, executor, seats, [lengths])


def _engine(models: Models, cache, executor, seats: int, listeners: Sequence = ()) -> LLMEngine:
    scheduler = ContinuousScheduler(cache, seats, 512)
    return LLMEngine(
        models.tokenizer,
        models.target.config,
        scheduler,
        executor,
        Listeners(listeners),
        supports=SUPPORTS,
        max_model_len=ROOM,
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
    seen, landed = [], engine.executor.landed

    def watched(batch, result, seconds):
        drafts = list(batch.requests[0].draft_ids)
        found = landed(batch, result, seconds)
        seen.append(Seen(drafts, found.tokens[0]))
        return found

    engine.executor.landed = watched
    return seen
