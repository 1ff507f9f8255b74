"""`ruvon top`: a running server's numbers in a terminal. Part 20's wiring."""

import sys
from typing import Annotated

import typer


def top(
    url: Annotated[str, typer.Argument(help="Where the server is.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Show the board once, and end.")] = False,
) -> None:
    """Watch a running server: tokens per second, latencies, queue and memory, until Ctrl-C."""
    from rich.console import Console

    from engine.cli.options import nobody_there
    from engine.outside import shown
    from engine.telemetry.top import NoAnswer
    from engine.telemetry.top import top as watch

    try:
        watch(url, Console(highlight=False), enough=lambda: once)
    except NoAnswer as error:
        sys.exit(f"ruvon top: {shown(nobody_there(str(error)))}")
    except KeyboardInterrupt:
        pass
