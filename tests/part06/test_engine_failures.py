"""What happens when a step fails, and who is told about what."""

import logging
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from engine.decoding.outputs import Logprob
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import Logits, ModelRunner, choose
from engine.requests.listeners import Listener, Listeners
from engine.requests.step import StepResult
from engine.scheduling.fifo import FIFOScheduler
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end, told_alone
from tests.part06.steps import Everybody

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def failing_at(step: int, error: Exception | None = None) -> tuple[BlockCache, FakeForward]:
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at[step] = error or RuntimeError("the cable came loose")
    return cache, forward


@pytest.mark.parametrize("step", [1, 2, 6])
def test_a_failed_step_fails_its_request_with_the_reason_and_the_engine_goes_on(fake_engine, step):
    cache, forward = failing_at(step)
    engine = fake_engine(cache=cache, forward=forward)
    for name in "abc":
        engine.add_request(name, f"prompt {name}", GREEDY)
    done = run_to_end(engine)
    assert list(done) == ["a", "b", "c"]
    assert done["a"].error == "RuntimeError: the cable came loose"
    assert done["a"].outputs[0].finish_reason == "error"
    assert done["a"].outputs[0].token_ids == told_alone("prompt a", GREEDY).token_ids[: step - 1]
    for name in "bc":
        assert done[name].error is None
        assert done[name].outputs[0].token_ids == told_alone(f"prompt {name}", GREEDY).token_ids


def test_a_failing_sampler_is_a_failed_step_too(fake_engine):
    cache, calls = BlockCache(64, 16), []

    def sampler(logits, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise ZeroDivisionError("no luck")
        return choose(logits, batch)

    engine = fake_engine(cache=cache, executor=ModelRunner([FakeForward(cache)], select=sampler))
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two", GREEDY)
    done = run_to_end(engine)
    assert done["a"].error == "ZeroDivisionError: no luck"
    assert done["b"].outputs[0].token_ids == told_alone("two", GREEDY).token_ids


def test_a_step_that_fails_while_its_result_is_awaited_is_a_failed_step_too(fake_engine):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)

    class Late:
        def __init__(self, pending, fails):
            self.pending, self.fails = pending, fails

        def result(self) -> StepResult:
            if self.fails:
                raise RuntimeError("found out late")
            return self.pending.result()

    class LateRunner(ModelRunner):
        def submit(self, batch):
            return Late(super().submit(batch), forward.steps == 2)

    engine = fake_engine(cache=cache, executor=LateRunner([forward]))
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two", GREEDY)
    done = run_to_end(engine)
    assert done["a"].error == "RuntimeError: found out late"
    assert done["b"].error is None


@pytest.mark.parametrize("step", [1, 3])
def test_a_request_that_recover_spares_is_computed_again_and_loses_nothing(fake_engine, step):
    cache, forward = failing_at(step)
    asked = []
    engine = fake_engine(
        cache=cache, forward=forward, recover=lambda step, error: asked.append((step, error)) or []
    )
    engine.add_request("a", "one", GREEDY)
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("one", GREEDY).token_ids
    ((failed, error),) = asked
    assert [request.id for request in failed.requests] == ["a/0"]
    assert str(error) == "the cable came loose"


def test_recover_may_fail_someone_who_was_not_in_the_step(fake_engine):
    cache, forward = failing_at(2)
    engine = fake_engine(cache=cache, forward=forward, recover=lambda *_: list(engine.scheduler.waiting))
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two", GREEDY)
    done = run_to_end(engine)
    assert done["a"].outputs[0].token_ids == told_alone("one", GREEDY).token_ids
    assert done["b"].error == "RuntimeError: the cable came loose"


def test_who_has_ended_before_does_not_fail_whatever_recover_says(fake_engine):
    cache, forward = failing_at(2)
    ended, recorder = [], Recorder()
    engine = fake_engine(
        cache=cache,
        forward=forward,
        recover=lambda step, error: [*ended, *step.requests],
        listeners=Listeners([recorder]),
    )
    engine.add_request("a", "one", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    engine.add_request("b", "two", GREEDY)
    ended += engine.scheduler.waiting[:1]
    done = run_to_end(engine)
    assert (done["a"].outputs[0].finish_reason, done["a"].error) == ("length", None)
    assert done["b"].outputs[0].finish_reason == "error"
    assert ended[0].output.finish_reason == "length", "what has ended keeps its reason"
    assert [what for event, what in recorder.heard if event == "finish"] == ["a/0", "b/0"]


def test_who_left_while_a_step_was_under_way_that_fails_gets_nothing_more(fake_engine):
    cache, forward = failing_at(1)
    engine = fake_engine(cache=cache, forward=forward)
    engine.add_request("a", "one", GREEDY)
    flying = engine.launch()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert engine.land(flying) == []


def test_when_one_of_n_samples_fails_the_others_go_on_and_the_error_is_told(fake_engine):
    cache, forward = failing_at(2)
    engine = fake_engine(cache=cache, forward=forward)
    params = SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True)
    engine.add_request("a", "one", params)
    (output,) = run_to_end(engine).values()
    assert [sample.finish_reason for sample in output.outputs] == ["error", "length"]
    assert output.error == "RuntimeError: the cable came loose"
    assert output.outputs[1].token_ids == told_alone("one", params, 1).token_ids


def test_listeners_hear_everything_in_order(fake_engine):
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]))
    engine.add_request("a", "one", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    run_to_end(engine)
    assert recorder.heard == [
        ("arrival", "a/0"),
        *[("schedule", ("a/0",)), ("step", ("a/0",))],
        *[("schedule", ("a/0",)), ("step", ("a/0",)), ("finish", "a/0")],
    ]


def test_every_request_that_arrives_is_finished_once_also_when_aborted_or_failed(fake_engine):
    cache, forward = failing_at(3)
    recorder = Recorder()
    engine = fake_engine(cache=cache, forward=forward, listeners=Listeners([recorder]))
    for name in "abcd":
        engine.add_request(name, name, GREEDY)
    engine.abort_request("b")
    engine.abort_request("b")
    run_to_end(engine)
    for event in ("arrival", "finish"):
        assert sorted(what for kind, what in recorder.heard if kind == event) == ["a/0", "b/0", "c/0", "d/0"]


@pytest.mark.parametrize("event", ["on_arrival", "on_schedule", "on_step", "on_finish"])
def test_a_listener_that_raises_neither_fails_a_step_nor_deafens_the_next(fake_engine, event, caplog):
    class Broken(Listener):
        pass

    def broken(self, *_):
        raise RuntimeError("I am ill")

    setattr(Broken, event, broken)
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([Broken(), recorder]))
    engine.add_request("a", "one", GREEDY)
    with caplog.at_level(logging.CRITICAL, "engine.requests.listeners"):
        (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("one", GREEDY).token_ids
    assert {kind for kind, _ in recorder.heard} == {"arrival", "schedule", "step", "finish"}


def test_step_records_add_up(fake_engine):
    recorder = Recorder()
    listeners = Listeners()
    listeners.add(recorder)
    engine = fake_engine(listeners=listeners, supports=SUPPORTS)
    prompts = {"a": "hello", "b": "hello there"}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    run_to_end(engine)
    records = recorder.records
    assert [record.number for record in records] == list(range(1, 13))
    assert [record.request_ids for record in records] == [("a/0",)] * 6 + [("b/0",)] * 6
    # Each prompt once, then a token a step; the last token chosen is never computed.
    assert [record.tokens_computed for record in records] == [(5,), *[(1,)] * 5, (11,), *[(1,)] * 5]
    held = [record.tokens_held for record in records]
    assert held == [(n,) for n in (*range(5, 11), *range(11, 17))]
    assert {record.tokens_cached for record in records} == {(0,)}
    assert [record.num_waiting for record in records] == [1] * 6 + [0] * 6
    assert [record.num_running for record in records] == [1] * 5 + [0] + [1] * 5 + [0]
    for before, after in zip([None, *records], records, strict=False):
        assert after.start + after.schedule_seconds + after.execute_seconds <= after.end
        assert min(after.schedule_seconds, after.execute_seconds) >= 0
        assert before is None or before.end <= after.start
        assert after.counters == {}


def test_a_step_records_times_are_of_its_parts(fake_engine, monkeypatch):
    """By a clock that goes on by 1 whenever the engine looks: before and after scheduling, and so on."""
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]))
    engine.add_request("a", "hello", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.llm_engine.time", SimpleNamespace(perf_counter=count(1).__next__))
        engine.step()
    (record,) = recorder.records
    run_to_end(engine)
    assert (record.start, record.schedule_seconds, record.execute_seconds, record.end) == (1, 1, 1, 4)


def test_the_sampler_is_called_with_one_row_for_each_logit(fake_engine):
    cache, shapes = BlockCache(64, 16), []

    def sampler(logits, batch):
        shapes.append((tuple(logits.values.shape), len(batch.rows.chosen)))
        return torch.zeros(len(logits.values), dtype=torch.long)

    engine = fake_engine(cache=cache, executor=ModelRunner([FakeForward(cache)], select=sampler))
    engine.add_request("a", "one", GREEDY)
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == [0] * 6
    assert shapes == [((1, 257), 1)] * 6


def test_a_failed_step_is_on_record_with_its_reason_and_then_who_ended_with_it(fake_engine):
    cache, forward = failing_at(1)
    recorder = Recorder()
    engine = fake_engine(cache=cache, forward=forward, listeners=Listeners([recorder]))
    engine.add_request("a", "one", GREEDY)
    run_to_end(engine)
    assert [kind for kind, _ in recorder.heard] == ["arrival", "schedule", "step", "finish"]
    assert recorder.records[0].error == "RuntimeError: the cable came loose"
    assert recorder.records[0].tokens_computed == (3,)


def test_a_token_that_cannot_be_taken_fails_its_request_and_no_other(fake_engine, caplog):
    """Such as an id that neither the model's vocabulary nor the tokenizer's knows."""
    engine = fake_engine(Everybody)
    for name in "abc":
        engine.add_request(name, f"prompt {name}", GREEDY)
    for _ in range(2):
        engine.step()
    engine.scheduler.running[1].output.append = None  # whatever goes wrong inside
    with caplog.at_level(logging.CRITICAL):
        done = run_to_end(engine)
    assert done["b"].outputs[0].finish_reason == "error"
    assert done["b"].error.startswith("TypeError")
    for name in "ac":
        assert done[name].outputs[0].token_ids == told_alone(f"prompt {name}", GREEDY).token_ids


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_fail_their_request_and_no_other(fake_engine, caplog, broken, temperature):
    cache = BlockCache(64, 16)

    class Poisoned(FakeForward):
        def __call__(self, batch) -> Logits:
            logits = super().__call__(batch)
            for row, where in enumerate(zip(batch.ids, batch.draws.positions, strict=True)):
                if where == ("b/0", 3):
                    logits.values[row, 100] = broken
            return logits

    engine = fake_engine(Everybody, cache, forward=Poisoned(cache))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, f"prompt {name}", params)
    with caplog.at_level(logging.CRITICAL):
        done = run_to_end(engine)
    assert done["b"].error == "ArithmeticError: the model's logits are not finite numbers"
    assert len(done["b"].outputs[0].token_ids) == 3
    for name in "ac":
        assert done[name].outputs[0].token_ids == told_alone(f"prompt {name}", params).token_ids


def test_requests_that_no_memory_will_ever_come_for_fail_with_the_reason_instead_of_waiting(fake_engine):
    class Full(BlockCache):
        def admit(self, seq):
            return None

    engine = fake_engine(cache=Full(64, 16))
    for name in "ab":
        engine.add_request(name, "one", GREEDY)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert "no room for the 3 tokens" in outputs[0].error


def test_a_single_step_without_work_is_no_failure(fake_engine):
    """Such as the one in which the only running request had to give its memory back."""

    class Blinking(FIFOScheduler):
        calls = 0

        def schedule(self):
            self.calls += 1
            return None if self.calls % 2 else super().schedule()

    engine = fake_engine(Blinking)
    engine.add_request("a", "one", GREEDY)
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("one", GREEDY).token_ids


def test_log_probabilities_reach_the_output_with_their_sum(fake_engine):
    """A fake of Part 10's scores: whatever the rows, a token of the prompt has a log probability of -1."""
    cache = BlockCache(64, 16)

    class Scored:
        def __call__(self, logits, token_ids, batch):
            return []

        def add_to(self, result, batch, token_ids, arrays):
            tokens = [[{id: Logprob(-0.5, 1, "") for id in ids}] for ids in result.tokens]
            prompt = [None, *[{0: Logprob(-1.0, 1, "")}] * 2] if batch.positions[0] == 0 else []
            return replace(result, logprobs=tokens, prompt_logprobs=[prompt])

    supports = SUPPORTS | {"logprobs", "prompt_logprobs"}
    runner = ModelRunner([FakeForward(cache)], scores=[Scored()])
    engine = fake_engine(cache=cache, executor=runner, supports=supports)
    params = replace(GREEDY, logprobs=1, prompt_logprobs=1)
    engine.add_request("a", "one", params)
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("one", GREEDY).token_ids
    assert len(output.prompt_logprobs) == 3
    assert output.outputs[0].cumulative_logprob == pytest.approx(-0.5 * 6)
    assert [list(one) for one in output.outputs[0].logprobs] == [[id] for id in output.outputs[0].token_ids]


def test_an_event_that_no_listener_can_have_is_an_error_where_it_is_told():
    """And not a line in a log. `tell` takes the method itself, so that mypy checks name and arguments."""
    recorder = Recorder()
    for listeners in (Listeners(), Listeners([recorder])):
        with pytest.raises(AttributeError, match="__name__"):
            listeners.tell("on_stpe", "a/0")
    listeners.tell(Listener.on_reject, "a/0", ValueError("x"))
    assert [kind for kind, _ in recorder.heard] == ["reject"]
