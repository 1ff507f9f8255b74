"""What some tests drive: a browser and a Prometheus, from Debian's packages, and axe-core, from npm."""

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DEADLINE = 240.0  # seconds after which what we wait for will never come: not a promise about speed
INSTALL = "tools/install_test_tools.sh installs it on Debian"
TOOLS = Path(__file__).parents[2] / ".tools"


def program(name: str) -> str:
    """Where it is. Skips the test without it, with the reason; fails it where RUVON_REQUIRE_TOOLS is set."""
    return needed(name, shutil.which(name))


def axe_core() -> str:
    """Its source: finds what of WCAG's rules a page breaks. Skips or fails as `program`."""
    return Path(needed("axe-core", next(TOOLS.glob("axe-core-*.js"), None))).read_text(encoding="utf-8")


def needed(name: str, found, how: str = INSTALL):
    """What was found. Skips or fails as `program`."""
    if not found:
        assert not os.environ.get("RUVON_REQUIRE_TOOLS"), f"{name} is not here; {how}"
        pytest.skip(f"needs {name}; {how}")
    return found


@pytest.fixture
def streamlit() -> None:
    """Skips or fails as `program` where the extra `ui` is not installed."""
    needed("streamlit", importlib.util.find_spec("streamlit"), "pip install 'ruvon[ui]'")


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def files_over_http(folder: Path, handler: type[SimpleHTTPRequestHandler] = QuietFiles) -> Iterator[str]:
    """Serve a folder from a thread; gives its URL. A browser loads modules over HTTP only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    executable = program("chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS, timeout=DEADLINE * 1e3)
        yield made
        made.close()
