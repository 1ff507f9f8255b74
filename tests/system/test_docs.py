"""The description of a whole server, /openapi.json: each route that a program may call is in it, in words."""

from pathlib import Path

import pytest

from engine import EngineArgs
from engine.cli.serve_flags import ServeFlags
from engine.cli.serving import Service
from engine.server import chat_page, live_routes, telemetry_routes
from engine.telemetry.history import DATA_PATH

ADAPTERS = Path(__file__).resolve().parents[2] / "adapters"
PAGES = {"/docs", "/openapi.json", DATA_PATH}.union(
    chat_page.FILES, live_routes.FILES, telemetry_routes.FILES
)


@pytest.fixture(scope="module")
def app():
    args = EngineArgs(model="storyteller-draft", enable_lora=True, kv_cache_memory_bytes=1 << 22)
    return Service(args, ServeFlags(lora_dir=ADAPTERS)).app([], None, True, None)


def test_what_is_not_described_is_a_page_or_what_a_page_loads(app):
    assert {route.path for route in app.routes if not route.include_in_schema} == PAGES


def test_each_route_says_in_words_what_it_does(app):
    names = {route.path_format: route.name.replace("_", " ").title() for route in app.routes}
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            assert operation["summary"] != names[path], f"{path}: its function's name says too little"


def test_streams_and_texts_are_described_as_what_they_are(app):
    def kinds(path: str) -> set[str]:
        (operation,) = app.openapi()["paths"][path].values()
        return set(operation["responses"]["200"]["content"])

    assert kinds("/metrics") == {"text/plain"}
    assert kinds("/engine/events") == {"text/event-stream"}
    assert kinds("/v1/responses") == {"application/json", "text/event-stream"}
