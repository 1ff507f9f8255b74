"""One HTTP request: when it came, when it must be over, and what it has asked for so far. Part 15.

It must be over by the operator's bound or the client's, whichever is sooner. A client says in the header
`X-Request-Timeout` how many seconds it has, counted from the request's arrival here. It is a header and no
field of the body, so that it works for every route, a proxy can set or lower it, and OpenAI's shapes stay as
they are. (OpenAI's client sends how long it will wait for the next byte; it then hangs up, which a server
notices anyway.)
"""

import asyncio
import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.server.backend import Backend
from engine.server.errors import RequestError

HEADER = "X-Request-Timeout"
PARAMETER = {
    "name": HEADER,
    "in": "header",
    "description": "Seconds from its arrival in which the request must be over",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


@dataclass
class Arrival:
    """An HTTP request, as admission control sees it."""

    time: float  # when it came, by the event loop's clock
    timeout: str | None = None  # the header, as it came
    sequences: int = 0  # asked for by its prompts so far
    tokens: int = 0

    def deadline(self, request_timeout: float | None) -> float:
        """When it must be over, by the event loop's clock; infinity: no bound. `request_timeout` is the
        operator's. Raises RequestError for a header that is no number of seconds.
        """
        client_seconds = math.inf if self.timeout is None else parse_seconds(self.timeout)
        return self.time + min(client_seconds, math.inf if request_timeout is None else request_timeout)


_arrival: ContextVar[Arrival] = ContextVar("arrival")  # of the request being answered


def this_arrival() -> Arrival:
    """The arrival of the request being answered; a new one for a caller without HTTP."""
    return _arrival.get(None) or Arrival(asyncio.get_running_loop().time())


class NoteArrival:
    """The gate that notes when a request came, and its header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            values = Headers(scope=scope).getlist(HEADER)  # two, joined, are refused as no number
            _arrival.set(Arrival(asyncio.get_running_loop().time(), ", ".join(values) if values else None))
        await self.app(scope, receive, send)


def deadlines(app: FastAPI, _: Backend) -> None:
    """The gate, as an extension of `create_app`, and the header in the description of the API."""
    app.add_middleware(NoteArrival)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None  # FastAPI makes it once
        description = describe()
        if is_new:
            for methods in description["paths"].values():
                if "post" in methods:
                    methods["post"].setdefault("parameters", []).append(PARAMETER)
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the description


def parse_seconds(text: str) -> float:
    """The header's number. Raises RequestError: it is no number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if "_" in text or not seconds > 0:  # Python alone reads 1_000 as a number
        message = f"{HEADER}={text!r}: a number of seconds above 0 is accepted"
        raise RequestError(400, message, param=HEADER)
    return seconds
