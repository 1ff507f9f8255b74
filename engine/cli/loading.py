"""What is said while a model is loaded, which takes minutes for a large one. Part 20's wiring."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Say on stderr that it is loaded, and for how long already; only to who sits at a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"Loading {model}", total=None)
        yield
