"""`sse.stream` alone, with chunks made here and the web server played by hand."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from engine.server import sse
from engine.server.errors import RequestError

SECONDS = 20.0  # after which what we wait for will never come


class Chunks:
    """An async iterator of chunks that can be closed; after them it ends, fails with `error`, or waits."""

    def __init__(self, *chunks, error=None, endless=False):
        self.left, self.error, self.endless, self.closed = list(chunks), error, endless, False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.left:
            return self.left.pop(0)
        if self.error:
            raise self.error
        if self.endless:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    async def aclose(self):
        self.closed = True


def play(chunks, leave_after=None, on_send=lambda text: None) -> list[str]:
    """Be the web server: everything the response sends, as text; hang up after some pieces."""

    async def run():
        sent, gone, closed = [], asyncio.Event(), []
        owned = AsyncExitStack()
        owned.callback(closed.append, True)
        response = sse.stream(chunks, owned)

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if text := message.get("body", b"").decode():
                on_send(text)
                sent.append(text)
                if len(sent) == leave_after:
                    gone.set()

        async with asyncio.timeout(SECONDS):
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        assert closed, "what the response owns is closed when it is over"
        return sent

    return asyncio.run(run())


def test_a_chunk_is_a_data_line_of_json_and_an_empty_line():
    assert play(Chunks({"text": "a\n\nb"}))[0] == 'data: {"text":"a\\n\\nb"}\n\n', (
        "an event is made by `event`"
    )


def test_done_comes_last():
    sent = play(Chunks({"n": 1}, {"n": 2}))
    assert sent == ['data: {"n":1}\n\n', 'data: {"n":2}\n\n', "data: [DONE]\n\n"], "every chunk, then [DONE]"


def test_a_chunk_is_sent_before_the_next_one_is_asked_for():
    chunks, left = Chunks({"n": 1}, {"n": 2}, {"n": 3}), []
    play(chunks, on_send=lambda text: left.append(len(chunks.left)))
    assert left[:3] == [2, 1, 0], "a chunk goes out as soon as it is there, not when all are"


@pytest.mark.parametrize("error", [OSError("no paper"), RequestError(503, "full")], ids=["ours", "known"])
def test_an_error_after_the_200_is_one_more_event_in_the_errors_shape(error):
    try:
        sent = play(Chunks({"n": 1}, error=error))
    except type(error):
        pytest.fail("the status has gone out: an error in the middle is sent as an event, not raised", False)
    assert sent[0] == 'data: {"n":1}\n\n', "what came before the error stays sent"
    told = json.loads(sent[1].removeprefix("data: ")) if sent[1].startswith("data: {") else sent[1]
    assert isinstance(told, dict), "the error is an event of JSON, as every chunk is"
    shape = set(told.get("error", ()))
    assert shape == {"message", "type", "param", "code"}, "the error's event has the body of as_request_error"
    assert sent[2:] == ["data: [DONE]\n\n"], "[DONE] follows the error: the client need not wait for more"


def test_the_chunks_are_closed_when_they_are_over():
    chunks = Chunks({"n": 1})
    play(chunks)
    assert chunks.closed, "`chunks` is closed in the end"


def test_a_client_that_leaves_closes_the_chunks():
    chunks = Chunks({"n": 1}, {"n": 2}, endless=True)
    play(chunks, leave_after=2)
    assert chunks.closed, "`chunks` is closed in the end, also when the client leaves in the middle"


def test_when_the_client_leaves_nothing_more_is_yielded():
    async def run():
        response = sse.stream(Chunks({"a": 1}, endless=True), AsyncExitStack())
        body = response.body_iterator
        await anext(body)
        try:
            await body.aclose()  # what the web server does when the client has left
        except RuntimeError as error:
            return str(error)

    went_on = asyncio.run(run())
    assert not went_on, "when the client has left, nothing more is yielded: no [DONE], no error event"
