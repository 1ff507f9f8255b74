"""The engine stops, hangs or dies, and everybody who reads or comes is told."""

import asyncio
import gc
import logging
import weakref

import pytest

from engine.core.engine_thread import EngineError, EngineThread
from engine.core.mailbox import Mailbox, Post
from engine.decoding.params import SamplingParams
from tests.part04.serving import DEADLINE, wait_until
from tests.part06.fakes import (
    BlockCache,
    FakeForward,
    Gate,
    ask,
    at_rest,
    held,
    read,
    told_alone,
    until,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_stop_aborts_what_is_running_and_waiting(fake_engine):
    gate = Gate(FakeForward(BlockCache(64, 16)), permits=2)
    engine = EngineThread(fake_engine(cache=gate.forward.cache, forward=gate), "fake")

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


def test_leaving_the_context_waits_for_the_last_step_beside_the_event_loop(fake_engine):
    gate = Gate(FakeForward(BlockCache(64, 16)))
    engine = EngineThread(fake_engine(cache=gate.forward.cache, forward=gate), "fake")

    async def run():
        async with engine:
            asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
            await until(lambda: gate.entered, asked)
            asyncio.get_running_loop().call_soon(gate.open)  # its turn comes while the context is left
        return await asked

    with at_rest(engine):
        assert asyncio.run(run())[-1].finished


@pytest.mark.parametrize("started", [False, True])
def test_an_engine_that_is_not_running_says_so_instead_of_waiting_for_ever(fake_engine, started):
    engine = EngineThread(fake_engine(), "fake")
    if started:
        engine.start()
        assert engine.health()
        engine.stop()
    assert not engine.health()
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(ask(engine, "hello", GREEDY, "a"))
    asyncio.run(engine.abort("a"))  # nobody has it: nothing to do
    engine.stop()


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


def test_stopping_does_not_wait_for_a_step_that_hangs_and_its_reader_is_told(
    engine, gate, monkeypatch, caplog
):
    monkeypatch.setattr("engine.core.engine_thread.STOP_SECONDS", 0.1)

    async def run():
        asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, asked)
        await asyncio.to_thread(engine.stop)
        assert not engine.health(), "an engine whose step hangs can serve nobody"
        with pytest.raises(EngineError, match="has not come back"):
            await asyncio.wait_for(asked, DEADLINE)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())
    assert "has not come back" in caplog.text, "the operator finds it in the log"
    with pytest.raises(EngineError, match="has not come back"):
        engine.start()
    gate.open()  # it comes back after all
    engine._thread.join(DEADLINE)
    engine.start()
    last = asyncio.run(ask(engine, "hello", GREEDY, "a"))[-1]
    assert last.outputs[0].token_ids == told_alone("hello", GREEDY).token_ids


def test_a_call_that_was_answered_is_not_there_any_more_when_the_engine_ends(engine):
    assert asyncio.run(engine.between_steps(lambda: "done")) == "done"
    assert not engine._uncalled, "nobody waits for it: the end has nothing to tell"
    engine.stop()
    assert not engine._thread or not engine._thread.is_alive()


def test_an_idle_engine_holds_nothing_of_the_command_it_ran_last(engine):
    """A command holds a reader's mailbox, and that its requests: they would stay until a new one comes."""

    class Caller:
        def call(self) -> str:
            return "done"

    async def run() -> weakref.ref:
        caller = Caller()
        assert await engine.between_steps(caller.call) == "done"
        return weakref.ref(caller)

    caller = asyncio.run(run())
    wait_until(lambda: gc.collect() >= 0 and caller() is None)


def test_who_waits_for_a_turn_between_two_steps_is_told_of_the_end(engine, gate, monkeypatch, caplog):
    monkeypatch.setattr("engine.core.engine_thread.STOP_SECONDS", 0.1)

    async def run():
        asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, asked)
        waiting, left = (asyncio.create_task(engine.between_steps(lambda: called.append(1))) for _ in "ab")
        await until(lambda: engine._commands.qsize() == 2, waiting, left)
        left.cancel()
        await asyncio.to_thread(engine.stop)
        for told in (waiting, asked):
            with pytest.raises(EngineError, match="has not come back"):
                await asyncio.wait_for(told, DEADLINE)

    called = []
    asyncio.run(run())
    gate.open()
    engine._thread.join(DEADLINE)
    assert not called, "who was told that it will not happen must not find it done"
    assert "outside a step" not in caplog.text, "nor is that a failure of the engine's"


def test_nobody_waits_for_ever_for_an_engine_that_fails_while_it_ends(fake_engine, caplog):
    gate = Gate(FakeForward(BlockCache(64, 16)))
    engine = EngineThread(fake_engine(cache=gate.forward.cache, forward=gate), "fake")
    engine.start()

    def fail() -> None:
        raise KeyError("who was that")

    async def run():
        asked = asyncio.create_task(ask(engine, "hello", GREEDY, "a"))
        await until(lambda: gate.entered, asked)
        engine._command(engine._stop)
        engine._command(fail)
        behind = asyncio.create_task(ask(engine, "there", GREEDY, "b"))
        await until(lambda: engine._commands.qsize() == 3, behind)
        gate.open()
        for told in (asked, behind):
            with pytest.raises(EngineError, match="who was that"):
                await asyncio.wait_for(told, DEADLINE)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())
    engine.stop()


DEATHS = [SystemExit(3), KeyboardInterrupt("a signal"), "abort"]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: str(death))
def test_an_engine_whose_thread_dies_is_an_error_to_all_who_read_and_all_who_come(
    fake_engine, caplog, monkeypatch, death
):
    """It was the last output of an abort, as if somebody had wished it."""
    cache = BlockCache(64, 16)
    gate = Gate(FakeForward(cache))
    engine = EngineThread(fake_engine(cache=cache, forward=gate), "fake")
    llm_engine, abort = engine.engine, engine.engine.abort_request
    if isinstance(death, BaseException):
        gate.forward.fail_at[2] = death  # past LLMEngine, which takes an Exception only
    else:  # an error outside a step's forward pass, and none of its requests can be ended

        def fail(*_) -> None:
            raise ZeroDivisionError(death)

        monkeypatch.setattr(llm_engine, "land", fail)
        monkeypatch.setattr(llm_engine, "abort_request", fail)

    async def run():
        engine.start()
        asked = [asyncio.create_task(ask(engine, name, GREEDY, name)) for name in "ab"]
        await until(lambda: gate.entered, *asked)
        behind = asyncio.create_task(engine.between_steps(lambda: gate.forward.steps))
        gate.open()
        for told in asked:
            with pytest.raises(EngineError, match=str(death)):
                await asyncio.wait_for(told, DEADLINE)
        told = asyncio.gather(behind, return_exceptions=True)  # it ran before the end, or is told of it
        await asyncio.wait_for(told, DEADLINE)
        await until(lambda: not engine.health())
        with pytest.raises(EngineError, match="not running"):
            await ask(engine, "late", GREEDY, "c")

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())
    assert "the engine's thread has died" in caplog.text, "the operator finds it in the log"
    engine.stop()
    for name in "ab":
        abort(name)


@pytest.mark.parametrize("where", ["queued", "between two steps"])
def test_who_meets_the_end_of_the_thread_in_a_command_is_told(engine, caplog, monkeypatch, where):
    def leave(*_) -> None:
        raise SystemExit("enough")

    async def run():
        monkeypatch.setattr(engine.engine, "add", leave)
        asked = ask(engine, "hello", GREEDY, "a") if where == "queued" else engine.between_steps(leave)
        with pytest.raises(EngineError, match="enough"):
            await asyncio.wait_for(asked, DEADLINE)
        await until(lambda: not engine.health())

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())


def test_a_closed_loop_keeps_no_other_reader_from_being_told_of_the_end(fake_engine):
    engine = EngineThread(fake_engine(), "fake")
    closed, loop = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    engine._mailboxes = {"gone": Mailbox(Post(closed)), "reads": Mailbox(Post(loop))}
    engine._give_up("it is over")
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert str(engine._mailboxes["reads"].unread) == "it is over"


def test_each_failure_of_the_end_is_in_the_log_with_where_it_came_from(fake_engine, caplog, monkeypatch):
    engine = EngineThread(fake_engine(), "fake")

    def fail() -> None:
        raise KeyError("who was that")

    def fail_again() -> None:
        raise OSError("not again")

    monkeypatch.setattr(engine.engine, "unfinished_request_ids", fail_again)
    engine._commands.put(fail)
    with caplog.at_level(logging.CRITICAL):
        engine._end(None)
    logged = [(record.getMessage(), record.exc_info and str(record.exc_info[1])) for record in caplog.records]
    assert [why for _, why in logged] == ["'who was that'", "not again"], "each with its own traceback"
    assert {message for message, _ in logged} == {"the engine failed while it ended"}
