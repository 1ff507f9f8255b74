"""The chat page at /: plain files, no build step, nothing from another host. Part 14.

The page uses only the routes that every client has; its Content-Security-Policy forbids any other request.
The page itself needs no API key, as the dashboard needs none. If the server has a key, the page asks the
reader for the key and sends it. The page stores nothing: closing the page discards conversation and key.
"""

from pathlib import Path

from fastapi import FastAPI

from engine.server.backend import Backend
from engine.server.telemetry_routes import page

PAGES = Path(__file__).parent / "pages"
FILES = {"/": PAGES / "chat.html"} | {
    f"/chat/{name}": PAGES / name for name in ("chat.css", "chat.js", "answer.js", "api.js", "stream.js")
}
OPEN_PATHS = frozenset(FILES)


def chat_page(app: FastAPI, _: Backend) -> None:
    """An extension of `create_app`: adds the page. Pass OPEN_PATHS to `create_app` as `open_paths`."""
    for path, file in FILES.items():
        app.get(path, include_in_schema=False)(page(file))
