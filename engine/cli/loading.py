"""What a model is called, and what is said while it is loaded, which may take minutes. Part 20's wiring."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.checkpoint import embedded_models


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Say on stderr that it is loaded, and for how long already; only to who sits at a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"Loading {public_name(model)}", total=None)
        yield


def public_name(model: str | Path) -> str:
    """What clients are told of a model: of a folder, not where it is."""
    folder = Path(os.path.expanduser(model))
    if str(model) in embedded_models() or not folder.is_dir():
        return str(model)
    return folder.resolve().name
