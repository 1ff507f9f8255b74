"""Speculation inside continuous batching: the target's own greedy text, whatever else happens."""

import pytest

from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.models.loader import load_model
from engine.requests.listeners import Listener
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.scheduling.static import StaticScheduler
from engine.speculation.capability import NgramProposer, Speculation
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.speculation.ngram import lookup
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer

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


def memory_of(config, kind: str) -> SlotMemory | PageMemory:
    if kind == "slots":
        return SlotMemory(config, 4, 256)
    return PageMemory(config, {"pages": 128, "few pages": 12, "just enough": JUST_ENOUGH}[kind], 8)


SCHEDULERS = {
    "continuous": lambda plan, budget: ContinuousScheduler(plan, 4, budget, select_rows=scored_rows),
    "static": lambda plan, budget: StaticScheduler(plan, 4, select_rows=scored_rows),
    "fifo": lambda plan, budget: FIFOScheduler(plan, select_rows=scored_rows),
}


def runner_of(model, memory) -> ModelRunner:
    last = LastTokens(4, next(model.parameters()).device)
    return ModelRunner([EagerWay(model, memory, upload=last.upload)], memory, last_tokens=last)


def make(
    models, tokenizer, how: str, kind="pages", budget: int = 64, lengths: DraftLengths | None = None,
    scheduler="continuous", engine_class=LLMEngine,
) -> LLMEngine:  # fmt: skip
    """`how`: "plain" proposes nothing, "lookup" and "model" do; by default as much as may be, whatever it
    costs.
    """
    target, draft = models
    memory, draft_probs = memory_of(target.config, kind), DraftProbs()
    caching = {} if kind == "slots" else {"enable_prefix_caching": kind == "pages"}
    plan, runner = memory.plan(**caching), runner_of(target, memory)
    runner.scores = [*logprobs_of(tokenizer, target.logits)]
    queues, capabilities = SCHEDULERS[scheduler](plan, budget), []
    if how != "plain":
        runner.select = RejectionSampler(draft_probs)
        proposer = NgramProposer(lookup)
        if how == "model":
            second = memory_of(draft.config, kind)
            runner.before.append(lambda batch: second.apply(batch.copies))
            reader = runner_of(draft, second)
            reader.select = DraftSampler(draft_probs)
            proposer = DraftModel(reader, plan, draft.config.max_positions)
        capabilities.append(Speculation(proposer, queues, lengths or DraftLengths(4, ALWAYS_DRAFT)))
    return engine_class(
        tokenizer, target.config, queues, runner, supports=SUPPORTS | {"priority"},
        max_model_len=256 if kind == "slots" else 96, capabilities=capabilities,
    )  # fmt: skip


def told(engine: LLMEngine, params: list[SamplingParams]) -> tuple[list, int]:
    """What each prompt's request ends with, and how many steps it took."""
    for i, (prompt, asked) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(i), prompt, asked)
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
    """How many pay depends on the machine, so the text must not depend on them: it is that of no drafts."""
    wishes = [
        SamplingParams(temperature=0.8, max_tokens=20, seed=i, top_p=0.9, frequency_penalty=-0.3 * i)
        for i in range(len(PROMPTS))
    ]
    plain, _ = told(make(models, tokenizer, "plain"), wishes)
    engine = make(models, tokenizer, how, "few pages", lengths=DraftLengths(most, ALWAYS_DRAFT))
    outputs, _ = told(engine, wishes)
    assert plain_words(outputs) == plain_words(plain)
    tally = engine.capabilities[0].tally
    assert 0 < tally.accepted < tally.proposed


def test_sampled_text_has_a_seed_of_its_own_where_none_is_named(models, tokenizer, monkeypatch):
    """The engine's seed is drawn: the same one gives the same text here, where as many drafts come."""
    wishes = [SamplingParams(temperature=0.8, max_tokens=20, top_p=0.9)] * len(PROMPTS)
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("engine.core.submission.seed_of", lambda params, seed=seed: seed)
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
