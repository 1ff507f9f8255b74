"""What an engine refuses before a step: fields, prompts, and lengths for which there is no room."""

import pytest

from engine.cache.buffer import BufferCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.fifo import FIFOScheduler
from tests.part06.fakes import CONFIG, TOKENIZER, Recorder

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.mark.parametrize("priority", [-101, 101, 2**31])
def test_priorities_have_few_levels_so_that_nobody_starves(fake_engine, priority):
    with pytest.raises(ParameterError, match="-100 to 100"):
        fake_engine(supports=SUPPORTS | {"priority"}).make_requests("a", "hello", priority=priority)


@pytest.mark.parametrize("priority", [-100, 100])
def test_the_outermost_priorities_are_accepted(fake_engine, priority):
    (made,) = fake_engine(supports=SUPPORTS | {"priority"}).make_requests("a", "hello", priority=priority)
    assert made.priority == priority


@pytest.mark.parametrize(
    ("prompt", "params", "options", "field"),
    [
        ("", {}, {}, "prompt"),
        ([], {}, {}, "prompt"),
        ([257], {}, {}, "prompt"),
        ([True], {}, {}, "prompt"),
        ("x" * 200, {}, {}, "prompt"),
        ("\ud800", {}, {}, "prompt"),
        ("a", {"logprobs": 1}, {}, "logprobs"),
        ("a", {"stop_token_ids": (999,)}, {}, "stop_token_ids"),
        ("a", {"logit_bias": {999: 1.0}}, {}, "logit_bias"),
        ("a", {"allowed_token_ids": [5, 999]}, {}, "allowed_token_ids"),
        ("a", {"bad_words": ["a", "\ud800"]}, {}, "bad_words"),
        ("a", {"truncate_prompt_tokens": 200}, {}, "truncate_prompt_tokens"),
        ("a", {}, {"priority": 1}, "priority"),
        ("a", {}, {"adapter": "poetry"}, "adapter"),
        ("a", {}, {"cache_salt": "me"}, "cache_salt"),
    ],
)
def test_a_request_that_is_refused_leaves_nothing_and_listeners_hear_of_it(
    fake_engine, prompt, params, options, field
):
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]))
    with pytest.raises(ParameterError) as caught:
        engine.add_request("a", prompt, SamplingParams(**params), **options)
    assert caught.value.field == field
    assert recorder.heard == [("reject", "a")]
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(("field", "value"), [("temperature", -1), ("top_k", "5"), ("stop", 5), ("n", 0)])
def test_a_field_that_was_changed_is_checked_when_the_request_comes(fake_engine, field, value):
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(ParameterError, match=f"{field}={value!r}") as caught:
        fake_engine().add_request("a", "hello", params)
    assert caught.value.field == field


@pytest.mark.parametrize("priority", [10**400, -(2**31) - 1, 2**31 + 1])
def test_a_priority_beyond_reason_is_refused(fake_engine, priority):
    engine = fake_engine(supports=SUPPORTS | {"priority"})
    with pytest.raises(ParameterError, match="priority"):
        engine.add_request("a", "hello", GREEDY, priority=priority)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len"), [(40, None), (40, 41), (40, 0), (200, 201), (400, 201)]
)
def test_a_length_that_model_or_cache_cannot_hold_is_refused_when_the_engine_is_made(
    max_tokens, max_model_len
):
    scheduler = FIFOScheduler(BufferCache(max_tokens))
    with pytest.raises(ValueError, match="max_model_len"):
        LLMEngine(TOKENIZER, CONFIG, scheduler, ModelRunner([]), max_model_len=max_model_len)
