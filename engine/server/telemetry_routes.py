"""The server's windows on the engine: /metrics for Prometheus, /dashboard for people. Part 11.

An extension for `create_app`. Both are open, with an API key too: vLLM guards /v1 alone, a scraper has no
key, and they tell counts, times and the model's name, never a text. `allowed_hosts` holds for them as for
every route. Requests that come at once share one answer, so that it takes little of the engine's time. The
page comes from files of this folder, read at the start, and asks no other host for anything; its
Content-Security-Policy lets it do nothing else.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import generate_latest

from engine.server.app import Extension
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
# Whatever a client accepts: as OpenMetrics, prometheus_client 0.26 would write a counter's colon as `_`.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_PATHS = frozenset({"/metrics", DATA_PATH, *FILES})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def telemetry_routes(metrics: EngineMetrics) -> Extension:
    """Routes that show `metrics`. Hand OPEN_PATHS to `create_app` as `open_paths`."""

    def extend(app: FastAPI, _: Backend) -> None:
        metrics_text = SharedAnswer(lambda: generate_latest(metrics.registry))
        snapshot_json = SharedAnswer(lambda: json.dumps(metrics.snapshot(), separators=(",", ":")).encode())

        @app.get("/metrics", include_in_schema=False)
        async def scrape() -> Response:
            return Response(await metrics_text.answer(), media_type=METRICS_TYPE)

        @app.get(DATA_PATH, include_in_schema=False)
        async def data() -> Response:
            """What the page and the terminal's board draw, once a second."""
            headers = {"Cache-Control": "no-store"}
            return Response(await snapshot_json.answer(), media_type="application/json", headers=headers)

        for path, file in FILES.items():
            app.get(path, include_in_schema=False)(page(file))

    return extend


class SharedAnswer:
    """Makes an answer in a thread, one call of `make` at a time. Requests that come during a call share the
    next one.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._lock = make, asyncio.Lock()
        self._num_started = 0  # calls of `make`
        self._latest_number = 0  # of the call that returned `_latest`, counted from 1; 0: none yet
        self._latest = b""

    async def answer(self) -> bytes:
        """What `make` returned in a call that began after this method was called."""
        num_before = self._num_started
        async with self._lock:
            if self._latest_number <= num_before:  # no other request began one meanwhile
                self._num_started += 1
                number = self._num_started
                content = await asyncio.to_thread(self._make)
                self._latest_number = number
                self._latest = content
            return self._latest


def page(file: Path) -> Callable[[], Awaitable[Response]]:
    """A route that sends this file, with headers that keep its page to this server."""
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return send
