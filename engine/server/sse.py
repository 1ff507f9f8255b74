"""Server-sent events: a long answer, sent line by line while it is made. Part 4.

Promises that what an answer was made from is closed when it is over, also when its client leaves, even before
the first byte; and that an error after that byte, when the status can no longer change, arrives as an event.
Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.server.errors import as_request_error

DONE = "data: [DONE]\n\n"  # OpenAI's mark of a complete stream


def event(data: dict) -> str:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """The events, and what must be closed after them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], owned: AsyncExitStack) -> None:
        # Proxies must not hold events back.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events, self.owned = events, owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A generator that never began runs no `finally`: the stack does not depend on it.
        async with self.owned, aclosing(self.events):
            await super().__call__(scope, receive, send)


def stream(chunks: AsyncGenerator[dict, None], owned: AsyncExitStack) -> EventStream:
    """Send each chunk as an event as soon as it is there, then [DONE]; an error ends it as an event.

    That event has the body of `as_request_error`, and [DONE] follows it too. `chunks` is closed in the end,
    also when the client leaves in the middle, and then nothing more is yielded; so is `owned`, which is the
    response's to close.
    """

    async def body() -> AsyncGenerator[str, None]:
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(as_request_error(error).body())
            yield DONE

    return EventStream(body(), owned)
