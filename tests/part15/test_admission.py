"""Who is admitted, who is turned away and in which words, and that every place comes back."""

import asyncio

import pytest

from engine.decoding.params import ParameterError, SamplingParams
from engine.server.deadline import Arrival, _arrival
from engine.server.errors import RequestError
from tests.part15.fakes import PARAMS, TOKENS, admission, held, output, run, turns


async def refused(backend, params=PARAMS) -> RequestError:
    try:
        await backend.generate("prompt", params, "r")
    except RequestError as error:
        return error
    raise AssertionError("admitted, and should have been refused")


def test_an_admitted_request_holds_its_places_until_it_is_closed():
    async def test():
        backend = admission(reqs=4)
        stream = await backend.generate("prompt", SamplingParams(n=2), "r")
        assert held(backend) == (2, 2 * TOKENS), "n samples are n sequences, each with prompt and output"
        for _ in range(2):
            await stream.aclose()
            assert held(backend) == (0, 0), "closed, read or not, once or twice: the places are back once"
        assert backend.backend.feeds[0].closed == 1, "the engine's own stream is closed with it"

    run(test())


def test_the_last_output_gives_the_places_back_before_anybody_closes():
    async def test():
        backend = admission()
        stream = await backend.generate("prompt", PARAMS, "r")
        backend.backend.feeds[0].say(output(("a", None)), output(("ab", "stop")), output(("abc", "stop")))
        assert [(await anext(stream)).finished for _ in range(2)] == [False, True]
        assert held(backend) == (0, 0), "who reads slowly keeps nobody out"
        assert await anext(stream, None) is None, "a stream that is over asks the engine for no more"

    run(test())


def test_an_error_gives_the_places_back():
    async def test():
        backend = admission()
        stream = await backend.generate("prompt", PARAMS, "r")
        backend.backend.feeds[0].say(RuntimeError("the engine's own"))
        with pytest.raises(RuntimeError, match="the engine's own"):
            await anext(stream)
        assert held(backend) == (0, 0), "a request that failed is over"

    run(test())


def test_who_finds_no_room_is_told_when_to_come_again():
    async def test():
        backend = admission(reqs=1)
        await backend.generate("prompt", PARAMS, "r")
        error = await refused(backend)
        assert (error.status, error.code) == (429, "queue_full"), "no room now: a 429, queue_full"
        assert error.headers == {"Retry-After": "1", "retry-after-ms": "100"}, (
            "no pace is known: the fewest whole seconds, and the fewest milliseconds"
        )
        assert "the queue is full" in error.message
        assert error.body()["error"]["type"] == "rate_limit_error"
        assert backend.refused["queue_full"] == 1
        assert held(backend) == (1, TOKENS), "who is refused holds nothing"

    run(test())


def test_samples_are_admitted_all_or_none():
    async def test():
        backend = admission(reqs=3)
        await backend.generate("prompt", PARAMS, "r")
        assert (await refused(backend, SamplingParams(n=3))).code == "queue_full"
        assert held(backend) == (1, TOKENS), "two places were free, three were wanted: none is taken"
        await backend.generate("prompt", SamplingParams(n=2), "r")
        assert held(backend) == (3, 3 * TOKENS), "the last places may be taken"

    run(test())


def test_tokens_that_find_no_room_take_no_places_either():
    async def test():
        backend = admission(tokens=TOKENS + 5)
        await backend.generate("prompt", PARAMS, "r")
        error = await refused(backend)
        assert (error.status, error.code) == (429, "queue_full"), "15 tokens have room, 20 are wanted"
        assert held(backend) == (1, TOKENS), "refused for its tokens, it holds no place as a sequence"
        assert backend.backend.feeds[1].closed == 1, "the engine's own stream is closed"

    run(test())


@pytest.mark.parametrize(
    ("limits", "param"), [((2, 1000), "n"), ((9, 20), "max_tokens"), ((3, 20), "max_tokens")]
)
def test_what_will_never_fit_is_told_so(limits, param):
    async def test():
        backend = admission(*limits)
        error = await refused(backend, SamplingParams(n=3))
        assert (error.status, error.code, error.param) == (400, "request_too_large", param), (
            "more than the whole queue: coming again helps nobody"
        )
        assert error.headers == {}
        assert held(backend) == (0, 0)

    run(test())


def test_prompts_of_one_request_that_together_never_fit_are_told_so():
    async def test():
        backend = admission(reqs=3)
        token = _arrival.set(Arrival(asyncio.get_running_loop().time()))
        streams = [await backend.generate("prompt", PARAMS, f"r-{i}") for i in range(3)]
        error = await refused(backend)
        _arrival.reset(token)
        assert error.code == "request_too_large", "its own four prompts are more than the whole queue"
        for stream in streams:
            await stream.aclose()
        assert held(backend) == (0, 0)

    run(test())


def test_a_deadline_counts_from_the_arrival():
    """What was spent since, on its prompt or behind other prompts of the same request, is spent."""

    async def test():
        backend = admission(request_timeout=1000)
        arrived = asyncio.get_running_loop().time() - 60
        token = _arrival.set(Arrival(arrived, timeout="100"))
        stream = await backend.generate("prompt", PARAMS, "r")
        _arrival.reset(token)
        assert stream._ends_at == arrived + 100, "the deadline counts from the arrival, not from now"
        await stream.aclose()

    run(test())


def test_a_part_of_a_second_is_not_waited_for():
    async def test():
        backend = admission(reqs=2, seats=1)
        backend.capacity.take(2, 2 * TOKENS)
        backend.capacity._clock.now = 2.5
        headers = (await refused(backend)).headers
        assert headers["Retry-After"] == "2", (
            "one leaves in 2.5 seconds: a client in the third second might find an empty seat"
        )
        assert headers["retry-after-ms"] == "2500", "the same time, which milliseconds need not round"


def test_a_queue_that_empties_within_a_second_says_so_in_milliseconds():
    async def test():
        backend = admission(reqs=2, seats=1)
        backend.capacity.take(2, 2 * TOKENS)
        for now, milliseconds in ((0.3004, "300"), (0.02, "100")):
            backend.capacity._clock.now = now
            headers = (await refused(backend)).headers
            assert headers == {"Retry-After": "1", "retry-after-ms": milliseconds}, (
                f"one leaves in {now} seconds: Retry-After would leave its seat empty"
            )

    run(test())


def test_tokens_of_prompts_that_together_never_fit_count_too():
    async def test():
        backend = admission(reqs=9, tokens=2 * TOKENS)
        token = _arrival.set(Arrival(asyncio.get_running_loop().time()))
        for i in range(2):
            await backend.generate("prompt", PARAMS, f"r-{i}")
        error = await refused(backend)
        _arrival.reset(token)
        assert (error.code, error.param) == ("request_too_large", "max_tokens"), "its three prompts together"
        assert "30 tokens" in error.message

    run(test())


def test_refusals_are_counted_and_an_abort_is_passed_on():
    async def test():
        backend, aborted = admission(reqs=1), []

        async def abort(request_id: str) -> None:
            aborted.append(request_id)

        backend.backend.abort = abort
        await backend.generate("prompt", PARAMS, "r")
        for _ in range(3):
            await refused(backend)
        assert backend.refused["queue_full"] == 3, "each refusal is counted"
        await backend.abort("r")
        assert aborted == ["r"]

    run(test())


@pytest.mark.parametrize("error", [ParameterError("stop", "stop is wrong"), RuntimeError("broken")])
def test_what_the_engine_refuses_gives_its_places_back(error):
    async def test():
        backend = admission()
        backend.backend.error = error
        with pytest.raises(type(error)):
            await backend.generate("prompt", PARAMS, "r")
        assert held(backend) == (0, 0), "what the engine refuses was not admitted"

    run(test())


def test_places_are_taken_before_the_prompt_is_looked_at():
    """Else a burst is tokenized in full, and refused afterwards."""

    async def test():
        backend = admission(reqs=1)
        desk = backend.backend
        desk.looking = asyncio.Event()
        first = asyncio.create_task(backend.generate("long prompt", PARAMS, "r"))
        await turns(first)
        assert held(backend)[0] == 1, "its place is taken while its prompt becomes tokens"
        assert (await refused(backend)).code == "queue_full"
        assert desk.seen == 1, "a request without a place is refused before its prompt is looked at"
        desk.looking.set()
        await (await first).aclose()
        assert held(backend) == (0, 0)

    run(test())


def test_a_client_that_leaves_while_its_prompt_is_looked_at_gives_its_place_back():
    async def test():
        backend = admission()
        backend.backend.looking = asyncio.Event()
        task = asyncio.create_task(backend.generate("long prompt", PARAMS, "r"))
        await turns(task)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), "whoever cancels is not told of success"
        assert held(backend) == (0, 0), "cancelled in the middle: the places are back"

    run(test())


def test_who_was_refused_does_not_count_for_the_pace():
    async def test():
        backend = admission(reqs=4, tokens=2 * TOKENS, seats=1)
        for name in "ab":
            await backend.generate("prompt", PARAMS, name)
        backend.capacity._clock.now = 4.0
        await refused(backend)
        assert backend.capacity.pace() == 0.25, (
            "nobody worked for who was refused: one in 4 seconds, who runs"
        )

    run(test())


def test_who_was_never_begun_does_not_count_for_the_pace():
    """The first prompts of a request whose last one is refused."""

    async def test():
        backend = admission(reqs=4, seats=1)
        streams = [await backend.generate("prompt", PARAMS, name) for name in "abcd"]
        backend.capacity._clock.now = 4.0
        for stream in streams[2:]:
            await stream.aclose()
        assert backend.capacity.pace() == 0.25, "two that leave without having begun are no fast engine"

    run(test())


def test_an_engine_that_has_ended_serves_nobody():
    async def test():
        backend = admission()
        assert backend.health()
        backend.backend.healthy = False
        error = await refused(backend)
        assert (error.status, error.code, error.headers) == (503, "engine_down", {})
        assert backend.refused["engine_down"] == 1, "who is refused is counted: `refusal` does so"
        assert backend.backend.seen == 0, "who cannot be served is refused before its prompt is looked at"
        with pytest.raises(RequestError) as caught:
            backend.health()
        assert caught.value.code == "engine_down", "/health says what clients are told"
        assert backend.refused["engine_down"] == 1, "/health is no refusal"

    run(test())


def test_a_server_that_shuts_down_takes_on_nobody_new():
    async def test():
        backend = admission()
        stream = await backend.generate("prompt", PARAMS, "r")
        backend.begin_shutdown(30)
        error = await refused(backend)
        assert (error.status, error.code) == (503, "shutting_down")
        assert error.headers == {"Retry-After": "30", "Connection": "close"}
        backend.backend.feeds[0].say(output(("ab", "stop")))
        assert (await anext(stream)).finished, "who was admitted goes on"
        assert backend.idle
        assert not backend._admitted, "what is over is forgotten"

    run(test())


def test_who_is_admitted_can_be_found():
    async def test():
        backend = admission()
        stream = await backend.generate("prompt", PARAMS, "r")
        assert backend._admitted == {stream}, "the stream is in `_admitted`, where `end_all` finds it"

    run(test())


def test_what_else_a_client_asks_for_reaches_the_engine():
    async def test():
        backend = admission()
        await backend.generate("prompt", PARAMS, "r", priority=3)
        assert backend.backend.options == {"priority": 3}, "the options are the backend's: priority, adapter"

    run(test())
