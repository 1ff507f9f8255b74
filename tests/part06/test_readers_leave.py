"""A reader leaves, its event loop closes, a request is aborted: that request ends, and no other."""

import asyncio
from contextlib import aclosing

from engine.decoding.params import SamplingParams
from tests.part04.serving import wait_until
from tests.part06.fakes import (
    ask,
    read,
    recorder_of,
    steps_of,
    told_alone,
    until,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


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


def test_who_stops_waiting_for_an_output_has_left_though_the_stream_is_still_held(engine, gate):
    async def run():
        stream = await engine.generate("hello", GREEDY, "a")
        waiting = asyncio.create_task(anext(stream))
        await until(lambda: gate.entered, waiting)
        waiting.cancel()
        await asyncio.wait([waiting])
        gate.open()
        await until(lambda: not engine.engine.has_unfinished_requests())
        assert await read(stream) == [], "who has left hears no more"

    asyncio.run(run())
    assert steps_of(engine, "a") == 1, "the request went on, with nobody waiting for it"


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


def test_a_reader_whose_loop_has_closed_is_aborted(engine, gate):
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(engine.generate("hello", GREEDY, "a"))
    gate.allow(1)
    loop.run_until_complete(anext(stream))
    loop.close()
    gate.allow(2)
    wait_until(lambda: not engine.engine.has_unfinished_requests())
    assert steps_of(engine, "a") <= 3


def test_a_reader_whose_loop_has_closed_on_something_unread_is_aborted(engine, gate):
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(engine.generate("hello", GREEDY, "a"))
    gate.allow(1)
    loop.run_until_complete(anext(stream))
    gate.allow(1)
    wait_until(lambda: stream._mailbox.post._unsent)  # the loop does not turn: nobody hands it out
    loop.close()
    gate.allow(2)
    wait_until(lambda: not engine.engine.has_unfinished_requests())
    assert steps_of(engine, "a") <= 4
