"""Server-sent events: a long answer, sent line by line while it is made. Part 4.

Promises that a client that leaves closes the stream's source at once, and that an error after the first byte,
when the status can no longer change, arrives as an event. Source:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse

from engine.server.errors import as_request_error

DONE = "data: [DONE]\n\n"  # OpenAI's mark of a complete stream


def event(data: dict) -> str:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def stream(chunks: AsyncGenerator[dict, None]) -> StreamingResponse:
    """Send each chunk as an event as soon as it is there, then [DONE]; an error ends it as an event."""

    async def body() -> AsyncIterator[str]:
        async with aclosing(chunks):  # closed also when the client leaves: the request is aborted
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(as_request_error(error).body())
            yield DONE

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)
