"""W3C's trace context: the headers by which a request is a part of somebody's trace. Part 20.

A client, or a proxy, names its own span in the headers `traceparent` and `tracestate`. The middleware reads
them, and the backend hands them to the engine with each prompt of the request, so that a listener can make a
span of it that belongs to the client's. Whether they are well formed is for that listener to see.
Source: https://www.w3.org/TR/trace-context/
"""

from contextvars import ContextVar
from typing import Any, Self

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream

HEADERS = ("traceparent", "tracestate")
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


def trace_context(app: FastAPI, _: Backend) -> None:
    """An extension of `create_app`."""
    app.add_middleware(TraceHeadersMiddleware)


class TracedBackend:
    """A backend that hands each request's trace context to the backend inside: the option `trace_headers`."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.supports = backend, backend.supports

    async def __aenter__(self) -> Self:
        await self.backend.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.backend.__aexit__(*details)

    def models(self) -> list[str]:
        return self.backend.models()

    def health(self) -> bool:
        return self.backend.health()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> OutputStream:
        """As the backend inside, whose errors are raised."""
        headers = _trace_headers.get()
        if headers:
            options["trace_headers"] = headers
        return await self.backend.generate(prompt, params, request_id, **options)

    async def abort(self, request_id: str) -> None:
        await self.backend.abort(request_id)
