"""Server-sent events: an answer that is sent piece by piece while the engine computes it. Part 4.

Promises that the streams behind an answer are closed when the answer ends, also when the client leaves, even
before the first byte. Promises also that an error after the first byte, when the status can no longer change,
arrives as an event. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.server.errors import as_request_error

DONE = "data: [DONE]\n\n"  # the last event of `stream`, as in OpenAI's completions


def event(data: dict) -> str:
    """One event. JSON text contains no raw line breaks, so one `data:` line is enough."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """A response that sends `events`, and closes `events` and the stack `on_end` at its end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], on_end: AsyncExitStack) -> None:
        # Proxies must not hold events back.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events, self.on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A generator that was never started runs no `finally`, so it cannot close the streams: `on_end` does.
        async with self.on_end, aclosing(self.events):
            await super().__call__(scope, receive, send)


def stream(chunks: AsyncGenerator[dict, None], on_end: AsyncExitStack) -> EventStream:
    """A response that sends each chunk as an event as soon as the chunk is there, then DONE.

    If `chunks` raises an Exception, the response sends an event with the body of `as_request_error`, then
    DONE. `chunks` is closed at the end, also when the client leaves in the middle; nothing more is yielded
    then. The response, an EventStream, closes `on_end`.
    """

    async def body() -> AsyncGenerator[str, None]:
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(as_request_error(error).body())
            yield DONE

    return EventStream(body(), on_end)
