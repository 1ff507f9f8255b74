"""Steps ahead and steps with drafts by turns, with real models: the target's own text and scores."""

import pytest

from engine.core.ahead import AheadEngine
from engine.decoding.params import SamplingParams
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of
from tests.part16.test_speculative_engine import (
    GREEDY,
    PROMPTS,
    Preemptions,
    expected,  # noqa: F401
    make,
    models,  # noqa: F401
    plain_words,
    tokenizer,  # noqa: F401
    told,
)


def mixing(models, tokenizer, how: str, policy: str, kind="pages", budget=64) -> AheadEngine:  # noqa: F811
    lengths = Policy(POLICIES[policy])
    engine = make(models, tokenizer, how, kind, budget, lengths, engine_class=AheadEngine)
    engine.listeners.add(lengths)
    return engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("how", "kind", "budget"),
    [
        ("model", "few pages", 12),
        ("model", "pages", 200),
        ("model", "slots", 12),
        ("lookup", "few pages", 200),
        ("lookup", "pages", 12),
    ],
)
def test_greedy_text_is_the_targets_own(models, tokenizer, expected, how, kind, budget, policy):  # noqa: F811
    """In chunks of prompts, with a shared beginning, and where memory runs out and somebody is preempted."""
    engine = mixing(models, tokenizer, how, policy, kind, budget)
    engine.listeners.add(preemptions := Preemptions())
    kinds = kinds_of(engine)
    outputs, _ = told(engine, [GREEDY] * len(PROMPTS))
    assert plain_words(outputs) == plain_words(expected[0])
    assert ("ahead" in kinds, "drafts" in kinds) == (policy != "always", policy != "never")
    assert (preemptions.count > 0) == (kind == "few pages")


WISHES = [
    SamplingParams(temperature=0, max_tokens=24, stop=["was", "."]),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, logprobs=2),
    SamplingParams(temperature=0.8, max_tokens=20, seed=3, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1, logprobs=0),
]
PENALTIES = SamplingParams(
    temperature=0, max_tokens=20, min_tokens=5, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wishes", [WISHES, [*WISHES[1:], PENALTIES]], ids=["", "with penalties"])
def test_what_each_request_asks_for_holds(models, tokenizer, wishes, policy):  # noqa: F811
    """Who has penalties holds up the others only while it is there."""
    plain, _ = told(make(models, tokenizer, "plain"), wishes)
    for how in ("model", "lookup"):
        engine = mixing(models, tokenizer, how, policy)
        kinds = kinds_of(engine)
        outputs, _ = told(engine, wishes)
        assert plain_words(outputs) == plain_words(plain)
        assert "ahead" in kinds or policy == "always"
        for ours, theirs in zip(outputs, plain, strict=True):
            mine, other = ours.outputs[0], theirs.outputs[0]
            assert (mine.logprobs is None) == (other.logprobs is None)
            for a, b in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert list(a) == list(b)
                assert [a[id].logprob for id in a] == pytest.approx([b[id].logprob for id in b], abs=1e-4)
            assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
