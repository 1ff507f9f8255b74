"""The deadline of an HTTP request, and how many sequences and tokens the request has asked for. Part 15.

A request's deadline is its arrival time plus a timeout: the operator's or the client's, whichever is shorter.
A client sends its timeout, in seconds, in the header `X-Request-Timeout`. The timeout is a header and not a
field of the body, so that every route accepts the timeout, a proxy can set or lower it, and OpenAI's shapes
stay unchanged. (The timeout that OpenAI's own client has is another one: how long to wait for the next byte.
After that time the client hangs up, which the server notices without a header.)
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
    "description": "The request must be over within this many seconds of its arrival",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


@dataclass
class Arrival:
    """An HTTP request, as admission control sees it. Its prompts are admitted one by one."""

    time: float  # when the request arrived, in seconds of the event loop's clock
    timeout: str | None = None  # the value of the header X-Request-Timeout; None if there is no header
    sequences: int = 0  # how many the prompts have asked for so far
    tokens: int = 0  # the most that these sequences may have, prompts and outputs

    def deadline(self, request_timeout: float | None) -> float:
        """The time by which the request must be over, in seconds of the event loop's clock.

        `request_timeout` is the operator's bound in seconds from the arrival; None means no bound. Without a
        bound of the operator or the client, the deadline is infinity. Raises RequestError if the client's
        header is not a number of seconds above 0.
        """
        operator_seconds = math.inf if request_timeout is None else request_timeout
        client_seconds = math.inf if self.timeout is None else parse_seconds(self.timeout)
        return self.time + min(operator_seconds, client_seconds)


_arrival: ContextVar[Arrival] = ContextVar("arrival")  # of the HTTP request that is being answered


def this_arrival() -> Arrival:
    """The Arrival of the HTTP request that is being answered.

    A caller without HTTP, such as a test, gets a new Arrival with the current time.
    """
    return _arrival.get(None) or Arrival(asyncio.get_running_loop().time())


def parse_seconds(text: str) -> float:
    """The header's value in seconds. Raises RequestError if `text` is not a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if "_" in text or not seconds > 0:  # only Python reads 1_000 as a number
        message = f"{HEADER}={text!r}: a number of seconds above 0 is accepted"
        raise RequestError(400, message, param=HEADER)
    return seconds


class ArrivalMiddleware:
    """Records the Arrival of each HTTP request: the time and the header X-Request-Timeout."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            values = Headers(scope=scope).getlist(HEADER)
            # Two headers are joined to a text that is no number, so that `parse_seconds` refuses them.
            timeout = ", ".join(values) if values else None
            _arrival.set(Arrival(asyncio.get_running_loop().time(), timeout))
        await self.app(scope, receive, send)


def add_deadlines(app: FastAPI, _: Backend) -> None:
    """An extension of `create_app`: reads the header X-Request-Timeout, and adds it to /openapi.json."""
    app.add_middleware(ArrivalMiddleware)
    make_description = app.openapi

    def openapi() -> dict[str, Any]:
        """The app's description. Each route that generates text has the header as a parameter."""
        if app.openapi_schema is not None:  # made before, and changed below
            return app.openapi_schema
        description = make_description()  # which FastAPI keeps in `app.openapi_schema`
        for operations in description["paths"].values():
            operation = operations.get("post")
            if operation is not None and _generates_text(operation):
                operation.setdefault("parameters", []).append(PARAMETER)
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the description


def _generates_text(operation: dict[str, Any]) -> bool:
    """Whether a route generates text: all routes that do can stream it. `operation` is OpenAPI's."""
    return "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
