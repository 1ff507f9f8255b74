"""The engine in its own thread: the event loop never computes, the step loop never waits for a reader."""

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.core.engine_thread import EngineError, EngineThread
from engine.core.mailbox import Mailbox, Post, Reader
from engine.decoding.params import ParameterError, SamplingParams
from engine.scheduling.fifo import FIFOScheduler
from tests.part04.serving import wait_until
from tests.part06.fakes import ask, at_rest, held, read, recorder_of, told_alone, until
from tests.part06.steps import Everybody

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


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


def test_it_is_known_before_how_many_tokens_a_request_may_have(engine):
    async def run():
        params = SamplingParams(temperature=0, max_tokens=20, n=2)
        return (await engine.generate("hello", params, "a")).tokens

    assert asyncio.run(run()) == 2 * (5 + 20), "of both samples, prompts included"


def test_who_leaves_before_the_first_output_was_asked_for_aborts_nothing():
    aborted = []
    reader = Reader(Mailbox(None), lambda: None, lambda: aborted.append(True), tokens=1)
    asyncio.run(reader.aclose())
    assert not aborted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads is the matter here
def test_in_a_forked_process_the_engine_does_not_run(engine):
    child = os.fork()
    if not child:
        os._exit(engine.health())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "its thread was not copied"
    assert engine.health()


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
        assert [type(error) for error in failed] == [EngineError, EngineError], failed
        assert "who was that" in str(failed[0])
        outputs = await ask(engine, "c", params, "c")
        assert outputs[-1].outputs[0].token_ids == told_alone("c", params).token_ids

    with at_rest(EngineThread(fake_engine(Tripping), "fake")) as engine, caplog.at_level(logging.CRITICAL):

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
    assert recorder_of(engine).heard.count(("reject", "a")) == 1, "listeners hear of it, too"


def test_a_refusal_is_raised_by_generate_itself_and_listeners_hear_of_it(engine, gate):
    async def run():
        with pytest.raises(ParameterError, match="prompt"):
            await engine.generate("", GREEDY, "a")

    asyncio.run(run())
    wait_until(lambda: recorder_of(engine).heard == [("reject", "a")])


def test_readers_in_several_event_loops_are_served(engine, gate):
    gate.open()

    def reader(i):
        return asyncio.run(ask(engine, f"prompt {i}", GREEDY, str(i)))[-1].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(reader, range(8)))
    assert results == [told_alone(f"prompt {i}", GREEDY).token_ids for i in range(8)]


def test_each_event_loop_gets_the_outputs_of_its_own_readers_alone(fake_engine):
    """One in another's thread could wake nobody safely."""

    class NotingPost(Post):
        def send(self, news):
            self.sent = news

    one, other = NotingPost(None), NotingPost(None)
    a, b, c = Mailbox(one), Mailbox(other), Mailbox(one)
    EngineThread(fake_engine(), "fake")._send({a: "for a", b: "for b", c: "for c"})
    assert (one.sent, other.sent) == ({a: "for a", c: "for c"}, {b: "for b"})


def test_n_samples_reach_one_reader(engine, gate):
    gate.open()
    params = SamplingParams(n=3, seed=4, max_tokens=8)
    last = asyncio.run(ask(engine, "hello", params, "a"))[-1]
    assert [sample.token_ids for sample in last.outputs] == [
        told_alone("hello", params, index).token_ids for index in range(3)
    ]


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
        async with EngineThread(fake_engine(Everybody), "fake") as running:
            with held(running):  # so that all eight are in the first step
                asking = [asyncio.create_task(ask(running, str(i), GREEDY, str(i))) for i in range(8)]
                await until(lambda: running._commands.qsize() == 8, *asking)
            await asyncio.gather(*asking)

    asyncio.run(run())
    assert 1 <= woken.count("_deliver") <= 20, "20 steps with 160 outputs: a call for each step, at most"


def test_a_loop_that_is_busy_is_woken_once_for_all_that_has_come_meanwhile(engine, gate, woken):
    gate.allow(1)

    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        await anext(stream)
        gate.open()
        wait_until(lambda: not engine.engine.has_unfinished_requests())  # blocks the loop, on purpose
        return await read(stream)

    assert asyncio.run(run())[-1].finished
    assert woken.count("_deliver") <= 3, "19 steps were delivered one by one to a loop that could not listen"


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


def test_each_step_is_told_although_one_sample_alone_has_grown(engine, gate):
    """First in, first out: the second sample of a request begins when the first has ended."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, n=2)

    async def run():
        outputs = await engine.generate("hello", params, "a")
        for expected in ([1, 0], [2, 0], [2, 1], [2, 2]):
            gate.allow(1)
            output = await anext(outputs)
            assert [len(sample.token_ids) for sample in output.outputs] == expected, (
                "a reader without a stream_interval is told what each step has brought"
            )
        await read(outputs)

    asyncio.run(run())
