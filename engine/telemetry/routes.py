"""The server's windows on the engine: /metrics for Prometheus, /dashboard for people. Part 11.

An extension for `create_app`. Both are open, with an API key too: vLLM guards /v1 alone, a scraper has no
key, and what is shown are counts, times and the model's name, never a text. Whom the server answers at all,
by the name it is asked for (`allowed_hosts`), holds for them as for every route. The page comes from files
of this folder and asks no other host for anything; its Content-Security-Policy lets it do nothing else.
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import generate_latest

from engine.server.app import Extension
from engine.server.backend import Backend
from engine.telemetry.history import DATA
from engine.telemetry.metrics import EngineMetrics

PAGES = Path(__file__).parent / "pages"
FILES = {
    "/dashboard": PAGES / "dashboard.html",
    "/dashboard/dashboard.css": PAGES / "dashboard.css",
    "/dashboard/dashboard.js": PAGES / "dashboard.js",
}
# Whoever reads: as OpenMetrics, prometheus_client 0.26 would write a counter's colon as `_`.
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_PATHS = frozenset({"/metrics", DATA, *FILES})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def telemetry(metrics: EngineMetrics) -> Extension:
    """Routes that show `metrics`. Hand OPEN_PATHS to `create_app` as `open_paths`."""

    def extend(app: FastAPI, _: Backend) -> None:
        @app.get("/metrics", include_in_schema=False)
        def scrape() -> Response:
            return Response(generate_latest(metrics.registry), media_type=TEXT)

        @app.get(DATA, include_in_schema=False)
        def data() -> JSONResponse:
            """What the page and the terminal's board draw, once a second."""
            return JSONResponse(metrics.snapshot(), headers={"Cache-Control": "no-store"})

        for path, file in FILES.items():
            app.get(path, include_in_schema=False)(send_file(file))

    return extend


def send_file(file: Path):
    """A route that sends this file, with headers that keep its page to this server."""

    def send() -> FileResponse:
        return FileResponse(file, headers=HEADERS)

    return send
