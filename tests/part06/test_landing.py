"""A step lands: several requests are in it, and much may have happened while it was under way."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.requests.listeners import Listeners
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end, told_alone
from tests.part06.steps import Everybody

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("gone", list("abc"))
def test_each_request_gets_its_own_token_whoever_left_meanwhile(fake_engine, gone):
    engine = fake_engine(Everybody)
    for name in "abc":
        engine.add_request(name, f"prompt {name}", GREEDY)
    engine.step()
    step = engine.launch()
    engine.abort_request(gone)
    engine.land(step)
    for request in step.requests:
        name = request.request_id
        if name != gone:
            assert request.output.token_ids == told_alone(f"prompt {name}", GREEDY).token_ids[:2], (
                f"{gone} left while the step was under way: the others' tokens are still at their own places "
                f"in the step, and {name} has its own second token"
            )
    run_to_end(engine)


def test_who_waits_again_when_the_step_lands_has_its_token(fake_engine):
    """From Part 13 on a request may lose its memory while a step of it is under way."""
    engine = fake_engine(Everybody)
    engine.add_request("a", "hello", GREEDY)
    engine.step()
    step = engine.launch()
    (request,), scheduler = step.requests, engine.scheduler
    scheduler.running.remove(request)
    scheduler.cache.preempt(request)
    request.num_computed_tokens = 0
    scheduler._enqueue(request)
    engine.land(step)
    expected = told_alone("hello", GREEDY).token_ids
    assert request.output.token_ids == expected[:2], (
        "only who has finished is passed over: a request that waits again has its token"
    )
    assert run_to_end(engine)["a"].outputs[0].token_ids == expected


def test_the_order_is_append_then_update_then_end(fake_engine, monkeypatch):
    engine, called = fake_engine(Everybody), []
    cache = engine.scheduler.cache
    for name in ("commit", "release"):
        call = getattr(cache, name)
        monkeypatch.setattr(
            cache, name, lambda *args, name=name, call=call: called.append(name) or call(*args)
        )
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=2))
    engine.step()
    called.clear()
    engine.step()
    assert called == ["commit", "release"], (
        "scheduler.update comes before the end of those who ended: it passes over who has finished, so what "
        "their last step computed would never be committed"
    )


def test_the_scheduler_gets_what_the_step_proposes(fake_engine):
    cache = BlockCache(64, 16)

    class Proposing(ModelRunner):
        def submit(self, batch):
            pending = super().submit(batch)
            return SimpleNamespace(result=lambda: replace(pending.result(), drafts=[[7], [8, 9]]))

    engine = fake_engine(Everybody, cache=cache, executor=Proposing([FakeForward(cache)]))
    for name in "ab":
        engine.add_request(name, name, GREEDY)
    engine.step()
    drafts = [request.draft_ids for request in engine.scheduler.running]
    assert drafts == [[7], [8, 9]], "scheduler.update gets the result's drafts, for the next step (Part 16)"
    for name in "ab":
        engine.abort_request(name)


def test_a_token_has_the_time_at_which_its_result_was_here(fake_engine, monkeypatch):
    cache, recorder, clock = BlockCache(64, 16), Recorder(), SimpleNamespace(now=0.0)

    class Slow(ModelRunner):
        def submit(self, batch):
            pending = super().submit(batch)

            def result():
                clock.now += 5.0  # what the device takes
                return pending.result()

            return SimpleNamespace(result=result)

    engine = fake_engine(cache=cache, executor=Slow([FakeForward(cache)]), listeners=Listeners([recorder]))
    engine.add_request("a", "hello", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.llm_engine.time", SimpleNamespace(perf_counter=lambda: clock.now))
        (output,) = engine.step()
    assert (output.stats.token_times, recorder.records[0].execute_seconds) == ([5.0], 5.0), (
        "the clock is read once the result is here: the wait for it is part of the step"
    )
    engine.abort_request("a")


@pytest.mark.parametrize("error", [ValueError("no such block"), MemoryError("full"), KeyError("a")])
def test_whatever_a_step_raises_it_is_taken_back_and_the_engine_goes_on(fake_engine, error):
    engine = fake_engine()
    engine.executor.ways[0].fail_at = {1: error}
    engine.add_request("a", "hello", GREEDY)
    try:
        (output,) = engine.step()
    except Exception as raised:
        pytest.fail(f"whatever exception a step raises, it is a failed step, but land() raised {raised!r}")
    assert output.error.startswith(type(error).__name__)


class Capability:
    """Notes in the counters that it was asked, and after whom; or fails."""

    def __init__(self, number: float, error: Exception | None = None) -> None:
        self.number, self.error = number, error

    def before_submit(self, step):
        return step.batch

    def must_land_first(self, step):
        return False

    def after_result(self, step, result):
        if self.error:
            raise self.error
        before = (result.counters or {}).get("asked", 0.0)
        return replace(result, counters={"asked": 10 * before + self.number})


def test_a_signal_is_no_failed_step(fake_engine):
    cache = BlockCache(64, 16)

    class Interrupted(ModelRunner):
        def submit(self, batch):
            def result():
                raise KeyboardInterrupt

            return SimpleNamespace(result=result)

    engine = fake_engine(cache=cache, executor=Interrupted([FakeForward(cache)]))
    engine.add_request("a", "one", GREEDY)
    try:
        engine.step()
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("a failed step is an Exception: KeyboardInterrupt and SystemExit go up to the caller")
    engine.abort_request("a")


def test_who_reads_the_record_of_a_step_finds_what_its_result_counted(fake_engine):
    cache, recorder = BlockCache(64, 16), Recorder()

    class Counting(ModelRunner):
        def submit(self, batch):
            pending = super().submit(batch)
            return SimpleNamespace(result=lambda: replace(pending.result(), counters={"graphs": 1.0}))

    engine = fake_engine(
        cache=cache, executor=Counting([FakeForward(cache)]), listeners=Listeners([recorder])
    )
    engine.add_request("a", "one", GREEDY)
    run_to_end(engine)
    assert {record.counters.get("graphs") for record in recorder.records} == {1.0}, (
        "_report gets the result's counters: they are in each step's record"
    )


def test_capabilities_make_the_result_one_after_the_other(fake_engine):
    recorder = Recorder()
    engine = fake_engine(listeners=Listeners([recorder]), capabilities=[Capability(1), Capability(2)])
    engine.add_request("a", "one", GREEDY)
    engine.step()
    assert recorder.records[0].counters == {"asked": 12.0}, (
        "the first capability gets the step's result, the second what the first returned, and what the last "
        "returned is the result: 12"
    )
    engine.abort_request("a")


def test_a_capability_that_raises_fails_the_step(fake_engine):
    engine = fake_engine(capabilities=[Capability(1, ValueError("no such rule"))])
    engine.add_request("a", "one", GREEDY)
    try:
        (output,) = engine.step()
    except ValueError:
        pytest.fail("what a capability raises in after_result fails the step, but land() raised it")
    assert output.error == "ValueError: no such rule"
