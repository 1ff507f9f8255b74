"""A request's time: where it counts from, who bounds it, and what is left of an answer when it is over."""

import asyncio
import math

import pytest

from engine.server.admission import AdmittedStream
from engine.server.deadline import Arrival, _arrival, parse_seconds
from engine.server.errors import RequestError
from tests.part04.serving import ends
from tests.part15 import instant
from tests.part15.fakes import PARAMS, TOKENS, Feed, admission, held, output, run, turns

SOON = 0.05  # seconds: a deadline that comes while the test waits for it


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "", "1_0", "1, 2"])
def test_a_header_that_is_no_number_of_seconds_is_a_400(text):
    with pytest.raises(RequestError, match="above 0 is accepted") as caught:
        parse_seconds(text)
    assert (caught.value.status, caught.value.param) == (400, "X-Request-Timeout")


@pytest.mark.parametrize(
    ("header", "operator", "seconds"),
    [(None, None, math.inf), ("3", None, 3), (None, 5, 5), ("3", 5, 3), ("7", 5, 5), ("inf", 5, 5)],
)
def test_the_sooner_of_the_two_bounds_counts_from_the_arrival(header, operator, seconds):
    assert Arrival(100.0, header).deadline(operator) == 100 + seconds


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_an_operator_cannot_ask_for_no_time(seconds):
    with pytest.raises(ValueError, match="request_timeout"):
        admission(request_timeout=seconds)


def admitted(backend, ends_in: float = math.inf, sequences: int = 1):
    """(the stream of a request that must be over in `ends_in` seconds, the engine's feed of it)"""
    feed = Feed(TOKENS * sequences)
    backend.capacity.take(sequences, feed.tokens)
    stream = AdmittedStream(backend, feed, sequences, asyncio.get_running_loop().time() + ends_in)
    backend._admitted.add(stream)
    return stream, feed


def test_a_wrong_header_takes_no_place():
    async def test():
        backend = admission()
        _arrival.set(Arrival(asyncio.get_running_loop().time(), "-1"))
        with pytest.raises(RequestError, match="above 0"):
            await backend.generate("prompt", PARAMS, "r")
        assert held(backend) == (0, 0), "a header that is wrong is a 400 before any place is taken"

    run(test())


@pytest.mark.parametrize("ends_in", [math.inf, 1000])
def test_until_its_deadline_a_request_gets_what_the_engine_says(ends_in):
    async def test():
        backend = admission()
        stream, feed = admitted(backend, ends_in)
        said = [output(("a", None)), output(("ab", None)), output(("abc", "length"))]
        for one in said:
            feed.say(one)
            assert await anext(stream) is one, "an output in time is passed on as it is"

    run(test())


def test_a_deadline_before_the_first_token_is_a_503():
    async def test():
        backend = admission()
        stream, feed = admitted(backend, SOON)
        reading = asyncio.ensure_future(anext(stream))
        assert await ends(reading), "waiting for an output must end with the deadline"
        error = reading.exception()
        assert isinstance(error, RequestError), f"no token by the deadline: a RequestError, not {error!r}"
        assert (error.status, error.code) == (503, "queue_timeout")
        assert "Retry-After" in error.headers
        assert backend.refused["queue_timeout"] == 1
        assert (held(backend), feed.closed) == ((0, 0), 1), "over its deadline, it has left the queue"

    run(test())


def test_a_running_request_ends_with_what_it_has():
    async def test():
        backend = admission()
        stream, feed = admitted(backend, 1000, sequences=2)
        feed.say(output(("ab", "stop"), ("c", None)))
        await anext(stream)
        stream._ends_at = asyncio.get_running_loop().time() + SOON
        last = await anext(stream)
        assert last.finished, "the deadline has come: this output is the last"
        assert [(one.text, one.finish_reason) for one in last.outputs] == [("ab", "stop"), ("c", "abort")], (
            'all that was said stays; what had no end has finish_reason "abort"'
        )
        assert backend.cut_short["queue_timeout"] == 1
        assert (held(backend), feed.closed) == ((0, 0), 1), "it is over for the engine, too"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(test())


def test_one_sample_that_has_begun_is_enough_to_be_kept():
    async def test():
        stream, feed = admitted(admission(), sequences=2)
        feed.say(output(("a", None), ("", None)))
        await anext(stream)
        stream.end("shutting_down")
        assert [one.text for one in (await anext(stream)).outputs] == ["a", ""], "it is kept"

    run(test())


def test_what_was_said_before_is_not_changed_by_the_end():
    async def test():
        stream, feed = admitted(admission())
        feed.say(output(("a", None)))
        first = await anext(stream)
        stream.end("shutting_down")
        await anext(stream)
        assert (first.finished, first.outputs[0].finish_reason) == (False, None), "a reader may still hold it"

    run(test())


def test_after_its_deadline_the_engine_is_not_asked_again():
    async def test():
        stream, feed = admitted(admission(), 1000)
        feed.say(output(("a", None)), output(("ab", "stop")))
        await anext(stream)
        stream._ends_at = asyncio.get_running_loop().time()
        last = await anext(stream)
        assert (last.outputs[0].text, feed.asked) == ("a", 1), "its time is over, whatever lies ready"

    run(test())


def test_an_end_that_comes_while_somebody_waits_is_noticed_at_once():
    async def test():
        backend = admission()
        stream, feed = admitted(backend)
        feed.say(output(("a", None)))
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await turns(reading)
        backend.end_all()
        await turns(reading)
        assert reading.done(), "waiting ends when the deadline is moved to now"
        assert reading.result().outputs[0].finish_reason == "abort"
        assert backend.cut_short["shutting_down"] == 1

    run(test())


def test_an_end_in_the_very_turn_of_a_deadline_leaves_nobody_behind():
    """The deadline has come, but its reader has had no turn yet: its timer cannot be wound any more."""

    async def test():
        backend, loop = admission(), asyncio.get_running_loop()
        streams = [admitted(backend, ends_in)[0] for ends_in in (SOON, math.inf, math.inf)]
        readings = [asyncio.ensure_future(anext(stream)) for stream in streams]
        ended = loop.create_future()

        def end() -> None:
            try:
                ended.set_result(backend.end_all())
            except RuntimeError as error:
                ended.set_exception(error)

        loop.call_at(streams[0]._ends_at, end)
        await asyncio.wait([ended])
        assert ended.exception() is None, "a deadline that has come is left as it is"
        assert all([await ends(reading) for reading in readings]), "everybody is told that it is over"
        for reading in readings:
            with pytest.raises(RequestError):
                await reading
        assert held(backend) == (0, 0)

    run(test())


def test_an_end_while_nobody_waits_is_noticed_at_the_next_reading():
    async def test():
        backend = admission()
        stream, feed = admitted(backend)
        backend.end_all()
        with pytest.raises(RequestError) as caught:
            await anext(stream)
        assert caught.value.code == "shutting_down", "the error says why it had to end"
        assert feed.asked == 0, "a request that must end is not begun"

    run(test())


def test_an_end_while_a_prompt_is_looked_at_is_noticed_too():
    async def test():
        backend = admission()
        backend.backend.looking = asyncio.Event()
        asking = asyncio.create_task(backend.generate("a long prompt", PARAMS, "r"))
        await turns(asking)
        backend.end_all()
        backend.backend.looking.set()
        with pytest.raises(RequestError) as caught:
            await anext(await asking)
        assert caught.value.code == "shutting_down", "who was looked at when all had to end is told, too"
        assert held(backend) == (0, 0)

    run(test())


def test_an_end_after_the_last_reading_disturbs_nobody():
    """The timer of a reading that is over must not be wound again."""

    async def test():
        backend = admission()
        stream, feed = admitted(backend, 1000)
        feed.say(output(("a", None)))
        await anext(stream)
        stream.end("shutting_down")
        await asyncio.sleep(0)
        assert (await anext(stream)).outputs[0].finish_reason == "abort"

    run(test())


def test_the_engines_own_timeout_is_an_error_like_any_other():
    async def test():
        backend = admission()
        stream, feed = admitted(backend, 1000)
        feed.say(output(("a", None)), TimeoutError("the engine's own"))
        await anext(stream)
        (got,) = await asyncio.gather(anext(stream), return_exceptions=True)
        assert isinstance(got, TimeoutError), "its deadline has not come: the engine's error is passed on"
        assert held(backend) == (0, 0), "a request that failed is over"

    run(test())


def test_a_client_that_leaves_while_waiting_gives_its_places_back():
    async def test():
        backend = admission()
        stream, feed = admitted(backend, 1000)
        reading = asyncio.create_task(anext(stream))
        await turns(reading)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled(), "whoever cancels is not given an output"
        assert (held(backend), feed.closed) == ((0, 0), 1), "a reader that was cancelled has left"

    run(test())


def test_at_the_very_time_of_the_deadline_it_has_come():
    """On a clock that stands still between two readings."""

    async def test():
        stream, feed = admitted(admission(), 10)
        feed.say(output(("a", None)), output(("ab", "stop")))
        await anext(stream)
        await asyncio.sleep(10)
        assert asyncio.get_running_loop().time() == stream._ends_at
        last = await anext(stream)
        rule = "at the deadline its time is over, not after it"
        assert (last.outputs[0].text, feed.asked) == ("a", 1), rule

    instant.run(test())
