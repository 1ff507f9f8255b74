"""The routes /metrics, for Prometheus, and /dashboard, for people. Part 11.

The routes need no API key, because scrapers have none; vLLM also protects only /v1. The routes show numbers,
and the names of the model and of adapters, but never a prompt or an answer. `allowed_hosts` applies as to
every route. Requests that arrive together share one answer, so that many take little of the engine's time.

The files of the page are read once, at the start. The page loads nothing from another host; its
Content-Security-Policy forbids any such request.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest

from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.telemetry.history import DATA_PATH
from engine.telemetry.metrics import EngineMetrics

PAGES = Path(__file__).parent / "pages"
FILES = {
    "/dashboard": PAGES / "dashboard.html",
    "/dashboard/dashboard.css": PAGES / "dashboard.css",
    "/dashboard/dashboard.js": PAGES / "dashboard.js",
}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The text format, even for a client that accepts OpenMetrics: prometheus_client 0.26 would write the colon in
# a counter's name as `_` there.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_PATHS = frozenset({"/metrics", DATA_PATH, *FILES})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def telemetry_routes(metrics: EngineMetrics) -> AppExtension:
    """An extension of `create_app` that shows `metrics`. Pass OPEN_PATHS to `create_app` as `open_paths`."""

    def extend(app: FastAPI, _: Backend) -> None:
        metrics_text = SharedAnswer(lambda: generate_latest(metrics.registry))
        snapshot_json = SharedAnswer(lambda: json.dumps(metrics.snapshot(), separators=(",", ":")).encode())

        @app.get(
            "/metrics",
            summary="Counts and times, for Prometheus, under vLLM's names",
            response_class=PlainTextResponse,
        )
        async def scrape() -> Response:
            return Response(await metrics_text.answer(), media_type=METRICS_TYPE)

        @app.get(DATA_PATH, include_in_schema=False)
        async def data() -> Response:
            """The data that the page and the terminal's dashboard draw; both ask once a second."""
            headers = {"Cache-Control": "no-store"}
            return Response(await snapshot_json.answer(), media_type="application/json", headers=headers)

        for path, file in FILES.items():
            app.get(path, include_in_schema=False)(page(file))

    return extend


class SharedAnswer:
    """Calls `make` in a thread, one call at a time. Requests during a call share the next call."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        """`make` makes an answer's content; it may take long."""
        self._make = make
        self._lock = asyncio.Lock()  # held during a call of `make`
        self._next: asyncio.Task[bytes] | None = None  # the call that has not begun yet, if there is one

    async def answer(self) -> bytes:
        """The result of a call of `make` that began after this method was called, or the error it raised."""
        if self._next is None:
            self._next = asyncio.create_task(self._call())
        return await asyncio.shield(self._next)  # a client that leaves does not cancel the others' call

    async def _call(self) -> bytes:
        """Call `make` when the call before is over."""
        async with self._lock:
            self._next = None  # this call begins now: later requests share the one after it
            return await asyncio.to_thread(self._make)


def page(file: Path) -> Callable[[], Awaitable[Response]]:
    """A route that sends `file`, which is read now. The headers forbid the page requests to other hosts.

    Raises OSError if the file cannot be read, and KeyError if its suffix is not in MEDIA_TYPES.
    """
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return send
