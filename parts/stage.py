"""What the demos share: a heading, a verdict, and a server on a free port.

Not part of the tool, and the only module here that demos import. `app` is any ASGI application.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

HOST = "127.0.0.1"  # this machine alone can reach it


def title(console: Console, text: str) -> None:
    """A rule with `text` on it, and a blank line on both sides."""
    console.print()
    console.rule(f"[bold]{text}", align="left")
    console.print()


def asked_to_serve(about: str) -> bool:
    """Whether the demo, of which `about` is the docstring, was given --serve; a wrong option ends it."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C instead, on port 8000")
    return parser.parse_args().serve


def yes(same: bool) -> str:
    return "yes" if same else "NO"


class Runner(Protocol):
    clock: float  # seconds that it has taken so far

    def advance(self) -> bool:
        """Take a step; False when there is none left."""


def side_by_side(
    console: Console, runners: Sequence[Runner], panel: Callable[[Runner], RenderableType]
) -> None:
    """Panels side by side, until all are done. Whoever has taken the least time takes the next step."""
    with Live(console=console, refresh_per_second=12) as live:
        running = list(runners)
        while running:
            runner = min(running, key=lambda runner: runner.clock)
            if not runner.advance():
                running.remove(runner)
            panels = Table.grid(expand=True)
            for _ in runners:
                panels.add_column(ratio=1)
            panels.add_row(*map(panel, runners))
            live.update(panels)


@contextmanager
def served(app) -> Iterator[str]:
    """Serve `app` from a thread on a port that the system picks; gives the address, stops at the end."""
    import uvicorn  # here: demos without a server need none

    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended before it had started; its log says why")
            time.sleep(0.01)
        yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
