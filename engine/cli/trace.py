"""`ruvon trace`: what a file of `--trace` says, in a few figures. Part 20's wiring."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def trace(
    file: Annotated[Path, typer.Argument(help="A file that --trace wrote, whole or cut off.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say what a trace shows, in five figures: where did the time go?

    1. Time to first token: what a user waits before anything moves.

    2. Time between tokens: how evenly a text runs. If p95 is high, look for long prompts in its steps.

    3. Wait in the queue: the part of the first that more seats or more memory would save.

    4. Time of a step: how much of it the device has, and how much the host has.

    5. Fill of a step: requests, and tokens against the budget. Preempted requests are computed twice.

    The file has each step and each request: open it at https://ui.perfetto.dev or chrome://tracing.
    """
    from rich.console import Console

    from engine.client.trace_view import trace_view
    from engine.client.untrusted import one_printable_line
    from engine.telemetry.trace_report import read_trace, trace_figures

    try:
        figures = trace_figures(read_trace(file))
    except ValueError as error:
        sys.exit(f"ruvon trace: {one_printable_line(error)}")
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        Console(highlight=False).print(trace_view(figures))
