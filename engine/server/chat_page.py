"""The chat page at /: plain files, no build step, no other host. Part 14.

Everything it does goes through the routes that any client has; its Content-Security-Policy lets it do nothing
else. It is open, as the dashboard is: with an API key, the page asks for it and sends it. It keeps nothing:
what was said, and the key, are gone with the page.
"""

from pathlib import Path

from fastapi import FastAPI

from engine.server.backend import Backend
from engine.server.telemetry_routes import page

PAGES = Path(__file__).parent / "pages"
FILES = {"/": PAGES / "chat.html"} | {
    f"/chat/{name}": PAGES / name for name in ("chat.css", "chat.js", "answer.js", "api.js")
}
OPEN_PATHS = frozenset(FILES)


def chat_page(app: FastAPI, _: Backend) -> None:
    """An extension for `create_app`; hand it OPEN_PATHS as `open_paths`."""
    for path, file in FILES.items():
        app.get(path, include_in_schema=False)(page(file))
