"""Silence where there is work: an engine that hangs, and one that is idle."""

import asyncio

import pytest

from engine.decoding.params import SamplingParams
from engine.server.admission import Admission
from engine.server.capacity import Capacity, QueueLimits
from engine.server.errors import RequestError
from engine.server.watch import STUCK_SECONDS, StepWatch
from tests.part06.fakes import Recorder, read, run_to_end, until
from tests.part15.fakes import Clock, run

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_silence_counts_only_where_there_is_work(fake_engine, clock):
    engine = fake_engine()
    watch = StepWatch(engine, clock)
    clock.now = 1000
    assert watch.silent_seconds() == 0, "an engine with nothing to do may be silent"
    engine.add_request("a", "hello", GREEDY)
    assert watch.silent_seconds() == 0, "silence begins with the arrival, however long it was idle before"
    clock.now += STUCK_SECONDS - 1
    assert not watch.is_stuck()
    clock.now += 1
    assert watch.is_stuck(), "work to do, and no sign of life for STUCK_SECONDS"
    engine.step()
    assert not watch.is_stuck(), "the step has come back"
    run_to_end(engine)
    clock.now += 1000
    assert watch.silent_seconds() == 0, "all have ended"


@pytest.mark.parametrize("sign", ["on_schedule", "on_step"])
def test_a_step_that_begins_and_one_that_ends_are_signs_of_life(fake_engine, clock, sign):
    engine = fake_engine()
    watch = StepWatch(engine, clock)
    engine.add_request("a", "hello", GREEDY)
    clock.now += STUCK_SECONDS
    assert watch.is_stuck()
    getattr(watch, sign)(None)
    assert watch.silent_seconds() == 0, f"{sign} is a sign of life"
    engine.abort_request("a")


def test_an_aborted_request_is_no_work(fake_engine, clock):
    engine = fake_engine()
    watch = StepWatch(engine, clock)
    engine.add_request("a", "hello", GREEDY)
    engine.abort_request("a")
    clock.now += 1000
    assert not watch.is_stuck()


def test_a_sign_is_given_before_work_is_seen(fake_engine, clock):
    """Else who looks in between, from another thread, finds work and the silence of the idle time before."""
    engine = fake_engine(listeners=None)
    watch = StepWatch(engine, clock)
    clock.now = 1000
    seen = []
    sign = watch._note_sign
    watch._note_sign = lambda: (seen.append(watch.silent_seconds()), sign())
    engine.add_request("a", "hello", GREEDY)
    assert seen == [0]
    engine.abort_request("a")


def test_a_step_that_hangs_is_said_and_one_that_comes_back_forgiven(engine, gate, clock):
    backend = Admission(engine, Capacity(QueueLimits(8, 10_000), 8), watch=StepWatch(engine.engine, clock))

    async def test():
        stream = await backend.generate("hello", GREEDY, "a")
        reading = asyncio.create_task(read(stream))
        await until(lambda: gate.entered == 1, reading)  # a step is under way, and hangs
        assert backend.health()
        clock.now += STUCK_SECONDS
        for refuse in (lambda: backend.generate("hello", GREEDY, "b"), backend.health):
            with pytest.raises(RequestError) as caught:
                await refuse()
            assert (caught.value.status, caught.value.code) == (503, "engine_stuck")
            assert "silent for 60 s" in caught.value.message
        gate.open()
        assert (await reading)[-1].outputs[0].finish_reason == "length", "the request has lost nothing"
        assert backend.health()

    run(test())
    assert any(isinstance(one, Recorder) for one in engine.engine.listeners._listeners)
