"""Speculation inside continuous batching: the target's own greedy text, whatever else happens."""

import pytest

from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.executor import ModelForward
from engine.listeners import Listener
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.static import StaticScheduler
from engine.scoring import ScoringExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import Lookup, SpeculativeExecutor
from engine.speculation.lengths import Lengths
from engine.speculation.ngram import lookup
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from engine.tokenizer import Tokenizer

PROMPTS = [
    "Once upon a time",
    "The little dog and the little cat and the little dog",
    "One day Tom and his mother went to the park. They saw a big tree and a small bird. " * 2,
    "Lily",
    "The end. The end. The end. The",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
JUST_ENOUGH = 21  # blocks of 8: what the four longest texts come to


@pytest.fixture(scope="module")
def models():
    return load_model("storyteller"), load_model("storyteller-draft")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained("storyteller")


class Always(Lengths):
    """So many, whatever it costs: timings must not decide what a test sees."""

    def asks(self, people):
        return True

    def choose(self, request_ids, caps):
        return [min(self.most, cap) for cap in caps]


def cache_of(config, kind: str):
    if kind == "slots":
        return SlotCache(config, 4, 256)
    if kind == "pages":
        return PagedCache(config, 128, 8)
    return PagedCache(
        config, {"few pages": 12, "just enough": JUST_ENOUGH}[kind], 8, enable_prefix_caching=False
    )


SCHEDULERS = {
    "continuous": lambda cache, budget: ContinuousScheduler(cache, 4, budget),
    "static": lambda cache, budget: StaticScheduler(cache, 4),
    "fifo": lambda cache, budget: FIFOScheduler(cache),
}


def proposing(how: str, cache, draft, kind: str) -> tuple:
    """The cache with what the proposer wants beside it, and the proposer."""
    if how == "lookup":
        return cache, Lookup(lookup)
    cache = PairedCache(cache, cache_of(draft.config, kind))
    return cache, DraftModel(draft, cache)


def make(
    models, tokenizer, how: str, kind="pages", budget: int = 64, most: int = 4, scheduler="continuous"
) -> LLMEngine:
    target, draft = models
    cache = cache_of(target.config, kind)
    if how == "plain":
        executor = ScoringExecutor(ModelForward(target, cache), tokenizer)
    else:
        cache, proposer = proposing(how, cache, draft, kind)
        verifier = Verifier(getattr(proposer, "probs", {}))
        inner = ScoringExecutor(ModelForward(target, cache), tokenizer, verifier)
        executor = SpeculativeExecutor(inner, cache, proposer, Always(most))
    return LLMEngine(
        tokenizer,
        target.config,
        SCHEDULERS[scheduler](cache, budget),
        executor,
        supports=SUPPORTS | {"priority"},
        max_model_len=256 if kind == "slots" else 96,
    )


def told(engine: LLMEngine, params: list[SamplingParams]) -> tuple[list, int]:
    """What each prompt's request ends with, and how many steps it took."""
    for i, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(i), prompt, own)
    ended, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        assert steps < 500, "it never ends"
        ended |= {out.request_id: out for out in engine.step() if out.finished}
        assert not any(out.error for out in ended.values()), [out.error for out in ended.values()]
    assert engine.scheduler.cache.usage().num_sequences == 0, "memory comes back"
    return [ended[str(i)] for i in range(len(PROMPTS))], steps


def plain_words(outputs) -> list:
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def expected(models, tokenizer):
    return told(make(models, tokenizer, "plain"), [GREEDY] * len(PROMPTS))


@pytest.mark.parametrize("how", ["model", "lookup"])
@pytest.mark.parametrize("kind", ["slots", "pages", "few pages"])
@pytest.mark.parametrize("budget", [12, 200])
def test_greedy_text_is_the_targets_own(models, tokenizer, expected, how, kind, budget):
    """In chunks of prompts, with a shared beginning, and where memory runs out and somebody is preempted."""
    engine = make(models, tokenizer, how, kind, budget)
    outputs, _ = told(engine, [GREEDY] * len(PROMPTS))
    assert plain_words(outputs) == plain_words(expected[0])


@pytest.mark.parametrize("scheduler", ["fifo", "static"])
def test_every_scheduler_takes_drafts(models, tokenizer, expected, scheduler):
    outputs, _ = told(make(models, tokenizer, "model", scheduler=scheduler), [GREEDY] * len(PROMPTS))
    assert plain_words(outputs) == plain_words(expected[0]), (
        "room is reserved for drafts, and only those that stand stay"
    )


def test_it_takes_fewer_steps(models, tokenizer, expected):
    _, steps = told(make(models, tokenizer, "model"), [GREEDY] * len(PROMPTS))
    assert steps < 0.6 * expected[1], "accepted drafts save steps"


def test_what_each_request_asks_for_holds(models, tokenizer):
    """Stop strings in the middle of several tokens, lengths, penalties, log probabilities."""
    wishes = [
        SamplingParams(temperature=0, max_tokens=24, stop=["was", "."]),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, min_tokens=20, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1, logprobs=0, logit_bias={300: 4.0}),
    ]
    plain, _ = told(make(models, tokenizer, "plain"), wishes)
    for how in ("model", "lookup"):
        outputs, _ = told(make(models, tokenizer, how), wishes)
        assert plain_words(outputs) == plain_words(plain)
        for ours, theirs in zip(outputs, plain, strict=True):
            for mine, other in zip(
                ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True
            ):
                assert list(mine) == list(other)
                for token in mine:
                    assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)


def test_the_last_token_that_fits_is_not_passed(models, tokenizer):
    """Nothing is proposed behind the end of what the model sees, or of what was asked for."""
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    plain, _ = told(make(models, tokenizer, "plain", "few pages"), [long] * len(PROMPTS))
    outputs, _ = told(make(models, tokenizer, "model", "few pages"), [long] * len(PROMPTS))
    assert plain_words(outputs) == plain_words(plain)
    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == 96 for o in outputs)


@pytest.mark.parametrize(("how", "most"), [("model", 1), ("model", 4), ("lookup", 4)])
def test_sampled_text_is_the_same_for_a_seed_with_however_many_drafts(models, tokenizer, how, most):
    """How many pay depends on time, so the text must not depend on them: it is that of no drafts."""
    wishes = [
        SamplingParams(temperature=0.8, max_tokens=20, seed=i, top_p=0.9, frequency_penalty=-0.3 * i)
        for i in range(len(PROMPTS))
    ]
    plain, _ = told(make(models, tokenizer, "plain"), wishes)
    engine = make(models, tokenizer, how, "few pages", most=most)
    outputs, _ = told(engine, wishes)
    assert plain_words(outputs) == plain_words(plain)
    assert 0 < engine.executor.tally.accepted < engine.executor.tally.proposed


def test_sampled_text_has_a_seed_of_its_own_where_none_is_named(models, tokenizer, monkeypatch):
    """The engine's seed is drawn: the same one gives the same text here, where as many drafts come."""
    wishes = [SamplingParams(temperature=0.8, max_tokens=20, top_p=0.9)] * len(PROMPTS)
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("engine.llm_engine.new_seed", lambda params, seed=seed: seed)
        outputs, _ = told(make(models, tokenizer, "model"), wishes)
        texts.append(plain_words(outputs))
    assert texts[0] == texts[1] != texts[2]


class Preemptions(Listener):
    def __init__(self) -> None:
        self.count = 0

    def on_preempt(self, request) -> None:
        self.count += 1


def test_proposals_preempt_nobody(models, tokenizer):
    """The cache has as many blocks as four of the texts come to, and not one for a guess."""
    counts = []
    for how in ("plain", "model", "lookup"):
        engine = make(models, tokenizer, how, "just enough", 200)
        engine.listeners.add(preemptions := Preemptions())
        told(engine, [GREEDY] * len(PROMPTS))
        counts.append(preemptions.count)
    assert counts == [0, 0, 0], "a proposal takes room that is free, and nobody's"
