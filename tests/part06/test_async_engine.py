"""The engine in its own thread: the event loop never computes, the step loop never waits for a reader."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from engine.async_engine import AsyncLLMEngine, EngineError
from engine.decoding.params import ParameterError, SamplingParams
from engine.listeners import Listeners
from engine.scheduling.fifo import FIFOScheduler
from tests.part04.serving import DEADLINE, wait_until
from tests.part06.fakes import (
    BlockCache,
    FakeForward,
    Gate,
    Recorder,
    ask,
    at_rest,
    held,
    read,
    told_alone,
    until,
)
from tests.part06.steps import Everybody

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def gate():
    return Gate(FakeForward(BlockCache(64, 16)))


@pytest.fixture
def engine(fake_engine, gate, passed):
    """An engine that makes as many steps as the test allows."""
    engine = fake_engine(cache=gate.forward.cache, forward=gate, listeners=Listeners([Recorder()]))
    with at_rest(AsyncLLMEngine(engine, "fake"), passed) as running:
        running.start()
        yield running
        gate.open()


def recorder_of(engine: AsyncLLMEngine) -> Recorder:
    return engine.engine.listeners._listeners[0]


def steps_of(engine: AsyncLLMEngine, request_id: str) -> int:
    return sum(event == "schedule" and f"{request_id}/0" in ids for event, ids in recorder_of(engine).heard)


def test_requests_at_once_get_what_each_would_get_alone(engine, gate):
    gate.open()

    async def run():
        asked = [ask(engine, f"prompt {i}", GREEDY, str(i)) for i in range(20)]
        return await asyncio.gather(*asked)

    for i, outputs in enumerate(asyncio.run(run())):
        expected = told_alone(f"prompt {i}", GREEDY)
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].token_ids == expected.token_ids
        assert outputs[-1].outputs[0].text == expected.text


def test_outputs_arrive_while_the_request_is_running(engine, gate):
    async def run():
        outputs = await engine.generate("hello", GREEDY, "a")
        for count in (1, 2, 3):
            gate.allow(1)
            output = await anext(outputs)
            assert len(output.outputs[0].token_ids) == count
        gate.open()
        assert (await read(outputs))[-1].finished

    asyncio.run(run())


def test_a_reader_who_leaves_frees_the_memory_by_the_next_step(engine, gate):
    gate.allow(2)

    async def run():
        async with aclosing(await engine.generate("hello", GREEDY, "a")) as outputs:
            while len((await anext(outputs)).outputs[0].token_ids) < 2:
                pass

    asyncio.run(run())
    gate.open()  # a third step may have been under way; no fourth one
    wait_until(lambda: not engine.engine.has_unfinished_requests())
    assert steps_of(engine, "a") <= 3
    assert ("finish", "a/0") in recorder_of(engine).heard


def test_a_reader_whose_task_is_cancelled_has_left(engine, gate):
    async def run():
        task = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, task)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    gate.open()
    wait_until(lambda: not engine.engine.has_unfinished_requests())
    assert steps_of(engine, "a") == 1


def test_a_slow_reader_holds_nobody_up_and_finds_the_latest(engine, gate):
    gate.allow(1)

    async def run():
        slow = await engine.generate("slow", GREEDY, "slow")
        assert len((await anext(slow)).outputs[0].token_ids) == 1
        gate.open()
        quick = await ask(engine, "quick", GREEDY, "quick")  # first in, first out: after slow's end
        assert quick[-1].outputs[0].token_ids == told_alone("quick", GREEDY).token_ids
        rest = await read(slow)
        assert len(rest) == 1, "unread outputs were kept"
        assert rest[0].finished
        assert rest[0].outputs[0].token_ids == told_alone("slow", GREEDY).token_ids

    asyncio.run(run())


def test_abort_gives_the_reader_a_last_output(engine, gate):
    gate.allow(1)

    async def run():
        outputs = await engine.generate("hello", GREEDY, "a")
        await anext(outputs)
        await engine.abort("a")
        gate.open()
        return (await read(outputs))[-1]

    output = asyncio.run(run())
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert 1 <= len(output.outputs[0].token_ids) <= 2


def test_a_waiting_request_can_be_aborted_and_is_never_run(engine, gate):
    async def run():
        first = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        second = asyncio.create_task(ask(engine, "there", GREEDY, "b"))
        await until(lambda: len(recorder_of(engine).heard) >= 2, first, second)
        await engine.abort("b")
        await engine.abort("nobody")
        gate.open()
        return await asyncio.gather(first, second)

    first, second = asyncio.run(run())
    assert first[-1].outputs[0].finish_reason == "length"
    assert second[-1].outputs[0].finish_reason == "abort"
    assert steps_of(engine, "b") == 0


def test_a_failed_step_is_an_error_for_its_reader_alone(engine, gate):
    gate.forward.fail_at[3] = RuntimeError("the cable came loose")
    gate.open()

    async def run():
        asked = [ask(engine, name, GREEDY, name) for name in "abc"]
        return await asyncio.gather(*asked, return_exceptions=True)

    failed, *others = asyncio.run(run())
    assert isinstance(failed, EngineError)
    assert str(failed) == "RuntimeError: the cable came loose"
    for name, outputs in zip("bc", others, strict=True):
        assert outputs[-1].outputs[0].token_ids == told_alone(name, GREEDY).token_ids


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_failure_outside_the_forward_pass_ends_the_requests_there_are_and_the_engine_goes_on(
    fake_engine, caplog, max_tokens
):
    """Also a request whose last token had just come: it is finished, and must not stay in the queue."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    class Tripping(FIFOScheduler):
        tripped = False

        def update(self, batch, drafts=None):
            if not self.tripped:
                self.tripped = True
                raise KeyError("who was that")
            super().update(batch, drafts)

    async def run(engine):
        failed = await asyncio.gather(
            *[ask(engine, name, params, name) for name in "ab"], return_exceptions=True
        )
        assert [type(error) for error in failed] == [EngineError, EngineError]
        assert "who was that" in str(failed[0])
        outputs = await ask(engine, "c", params, "c")
        assert outputs[-1].outputs[0].token_ids == told_alone("c", params).token_ids

    with at_rest(AsyncLLMEngine(fake_engine(Tripping), "fake")) as engine, caplog.at_level(logging.CRITICAL):

        async def both_at_once():
            engine.start()
            with held(engine):
                task = asyncio.create_task(run(engine))
                await until(lambda: engine._commands.qsize() == 2, task)
            await task

        asyncio.run(both_at_once())


def test_a_name_in_use_is_refused_and_its_owner_is_not_disturbed(engine, gate):
    async def run():
        first = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, first)
        second = asyncio.create_task(ask(engine, "there", GREEDY, "a"))
        await until(lambda: not engine._commands.empty(), first, second)
        gate.open()
        with pytest.raises(ParameterError, match="in use"):
            await second
        return await first

    assert asyncio.run(run())[-1].outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


def test_a_refusal_is_raised_by_generate_itself_and_listeners_hear_of_it(engine, gate):
    async def run():
        with pytest.raises(ParameterError, match="prompt"):
            await engine.generate("", GREEDY, "a")

    asyncio.run(run())
    wait_until(lambda: recorder_of(engine).heard == [("reject", "a")])


def test_stop_aborts_what_is_running_and_waiting(fake_engine):
    gate = Gate(FakeForward(BlockCache(64, 16)), permits=2)
    engine = AsyncLLMEngine(fake_engine(cache=gate.forward.cache, forward=gate), "fake")

    async def run():
        async with engine:
            asked = [asyncio.create_task(ask(engine, name, GREEDY, name)) for name in "ab"]
            told = engine._commands.qsize
            await until(lambda: gate.entered == 3 and ("b" in engine._mailboxes or told() == 1), *asked)
            before = told()
            stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
            await until(lambda: told() > before)
            gate.open()
            await stopping
            return await asyncio.gather(*asked)

    with at_rest(engine):
        a, b = asyncio.run(run())
    assert [outputs[-1].outputs[0].finish_reason for outputs in (a, b)] == ["abort", "abort"]
    assert len(a[-1].outputs[0].token_ids) <= 3
    assert b[-1].outputs[0].token_ids == []


@pytest.mark.parametrize("started", [False, True])
def test_an_engine_that_is_not_running_says_so_instead_of_waiting_for_ever(fake_engine, started):
    engine = AsyncLLMEngine(fake_engine(), "fake")
    if started:
        engine.start()
        assert engine.health()
        engine.stop()
    assert not engine.health()
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(ask(engine, "hello", GREEDY, "a"))
    engine.stop()


def test_a_reader_whose_event_loop_has_closed_disturbs_nobody(engine, gate):
    loop = asyncio.new_event_loop()
    gate.allow(1)
    try:
        outputs = loop.run_until_complete(engine.generate("hello", GREEDY, "a"))
        loop.run_until_complete(anext(outputs))
    finally:
        loop.close()
    gate.open()
    other = asyncio.run(ask(engine, "there", GREEDY, "b"))
    assert other[-1].outputs[0].token_ids == told_alone("there", GREEDY).token_ids


def test_readers_in_several_event_loops_are_served(engine, gate):
    gate.open()

    def reader(i):
        return asyncio.run(ask(engine, f"prompt {i}", GREEDY, str(i)))[-1].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(reader, range(8)))
    assert results == [told_alone(f"prompt {i}", GREEDY).token_ids for i in range(8)]


def test_n_samples_reach_one_reader(engine, gate):
    gate.open()
    params = SamplingParams(n=3, seed=4, max_tokens=8)
    last = asyncio.run(ask(engine, "hello", params, "a"))[-1]
    assert [sample.token_ids for sample in last.outputs] == [
        told_alone("hello", params, index).token_ids for index in range(3)
    ]


def test_a_reader_that_is_dropped_in_mid_answer_has_left(engine, gate):
    gate.allow(1)

    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        async for _ in stream:
            break
        del stream
        gate.open()
        await until(lambda: not engine.engine.has_unfinished_requests())

    asyncio.run(run())
    assert steps_of(engine, "a") < 20, "the request went on to its end, with nobody reading"


def test_a_stream_that_was_never_read_costs_nothing(engine, gate):
    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        await stream.aclose()
        assert await read(stream) == []

    asyncio.run(run())
    gate.open()
    assert engine._commands.empty()
    assert recorder_of(engine).heard == []


def test_leaving_late_does_not_abort_another_request_of_the_same_name(engine, gate):
    gate.allow(1)

    async def run():
        first = await engine.generate("hello", GREEDY, "a")
        await anext(first)
        await engine.abort("a")
        gate.allow(1)
        await until(lambda: not engine.engine.has_unfinished_requests())
        second = await engine.generate("there", GREEDY, "a")
        gate.allow(1)
        await anext(second)
        await first.aclose()  # it never read its last output
        gate.open()
        return await read(second)

    assert asyncio.run(run())[-1].outputs[0].token_ids == told_alone("there", GREEDY).token_ids


def test_what_was_delivered_before_the_engine_ended_is_still_read(engine, gate):
    """On a busy machine a reader may come back only when all is over."""
    gate.allow(1)

    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        await anext(stream)
        gate.open()
        await asyncio.to_thread(wait_until, lambda: not engine.engine.has_unfinished_requests())
        await asyncio.to_thread(engine.stop)
        return await read(stream)

    assert asyncio.run(run())[-1].outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


def test_a_request_that_came_while_the_engine_was_ending_is_told_so(engine):

    async def run():
        with held(engine):
            engine._command(engine._stop)
            asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
            await until(lambda: engine._commands.qsize() == 2)
        return await asyncio.wait_for(asked, DEADLINE)

    assert asyncio.run(run())[-1].outputs[0].finish_reason == "abort"


def test_an_engine_stopped_twice_serves_again_once_it_is_started(engine, gate):
    gate.open()
    for _ in range(2):
        engine.stop()
        engine.stop()
        engine.start()
        assert engine.health()
        last = asyncio.run(ask(engine, "hello", GREEDY, "a"))[-1]
        assert last.outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


def test_stopping_does_not_wait_for_a_step_that_hangs_and_its_reader_is_told(engine, gate, monkeypatch, caplog):
    monkeypatch.setattr("engine.async_engine.STOP_SECONDS", 0.1)

    async def run():
        asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, asked)
        await asyncio.to_thread(engine.stop)
        assert not engine.health(), "an engine whose step hangs can serve nobody"
        with pytest.raises(EngineError, match="has not come back"):
            await asyncio.wait_for(asked, DEADLINE)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())
    with pytest.raises(EngineError, match="has not come back"):
        engine.start()
    gate.open()  # it comes back after all
    engine._thread.join(DEADLINE)
    engine.start()
    last = asyncio.run(ask(engine, "hello", GREEDY, "a"))[-1]
    assert last.outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_for_an_engine_that_fails_while_it_ends(fake_engine):
    gate = Gate(FakeForward(BlockCache(64, 16)))
    engine = AsyncLLMEngine(fake_engine(cache=gate.forward.cache, forward=gate), "fake")
    engine.start()

    def fail() -> None:
        raise KeyError("who was that")

    async def run():
        asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, asked)
        engine._command(engine._stop)
        engine._command(fail)
        gate.open()
        with pytest.raises(EngineError, match="the engine has ended"):
            await asyncio.wait_for(asked, DEADLINE)

    asyncio.run(run())
    engine.stop()
    engine.engine.abort_request("a")


@pytest.fixture
def woken(monkeypatch):
    """What other threads ask the event loop to call, by name."""
    names = []
    call = asyncio.BaseEventLoop.call_soon_threadsafe

    def noted(loop, function, *args, **options):
        names.append(getattr(function, "__name__", ""))
        return call(loop, function, *args, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", noted)
    return names


def test_a_step_wakes_an_event_loop_once_however_many_read_there(fake_engine, woken):
    async def run():
        async with AsyncLLMEngine(fake_engine(Everybody), "fake") as running:
            with held(running):  # so that all eight are in the first step
                asking = [asyncio.create_task(ask(running, str(i), GREEDY, str(i))) for i in range(8)]
                await until(lambda: running._commands.qsize() == 8, *asking)
            await asyncio.gather(*asking)

    asyncio.run(run())
    assert 1 <= woken.count("_hand_out") <= 20, "20 steps with 160 outputs: a call for each step, at most"


def test_a_loop_that_is_busy_is_woken_once_for_all_that_has_come_meanwhile(engine, gate, woken):
    gate.allow(1)

    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        await anext(stream)
        gate.open()
        wait_until(lambda: not engine.engine.has_unfinished_requests())  # blocks the loop, on purpose
        return await read(stream)

    assert asyncio.run(run())[-1].finished
    assert woken.count("_hand_out") <= 3, "19 steps were delivered one by one to a loop that could not listen"


def test_a_long_prompt_is_tokenized_beside_the_event_loop_and_a_short_one_at_once(engine, gate, monkeypatch):
    gate.open()
    threads, make = [], engine.engine.make_requests
    monkeypatch.setattr(
        engine.engine,
        "make_requests",
        lambda *a, **b: threads.append(threading.current_thread()) or make(*a, **b),
    )

    async def run():
        await ask(engine, "hello", GREEDY, "a")
        with pytest.raises(ParameterError):
            await engine.generate("x" * 2000, GREEDY, "b")

    asyncio.run(run())
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


def test_a_reader_whose_loop_has_closed_is_aborted(engine, gate):
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(engine.generate("hello", GREEDY, "a"))
    gate.allow(1)
    loop.run_until_complete(anext(stream))
    loop.close()
    gate.allow(2)
    wait_until(lambda: not engine.engine.has_unfinished_requests())
    assert steps_of(engine, "a") <= 3
