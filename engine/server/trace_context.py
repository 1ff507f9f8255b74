"""W3C's trace context: headers that make a request a part of the client's trace. Part 20.

A client, or a proxy, names its own span in the headers `traceparent` and `tracestate`. The middleware notes
them, and the backend hands them to the engine with each prompt of the request. A listener can then make the
prompt's span a child of the client's. That listener also checks whether the headers are well formed.
Source: https://www.w3.org/TR/trace-context/
"""

from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream
from engine.server.wrapped_backend import WrappedBackend

HEADERS = ("traceparent", "tracestate")
# Of the HTTP request that is being answered: header -> value, as far as they were sent.
_trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)


class TraceHeadersMiddleware:
    """Notes the trace context of each HTTP request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            _trace_headers.set({name: headers[name] for name in HEADERS if name in headers})
        await self.app(scope, receive, send)


def add_trace_context(app: FastAPI, _: Backend) -> None:
    """An extension of `create_app`: reads the trace context of each request."""
    app.add_middleware(TraceHeadersMiddleware)


class TracedBackend(WrappedBackend):
    """A backend that hands each request's trace context to the backend inside: the option `trace_headers`."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> OutputStream:
        """As the backend inside, whose errors are raised."""
        headers = _trace_headers.get()
        if headers:
            options["trace_headers"] = headers
        return await self.backend.generate(prompt, params, request_id, **options)
