"""Around the loading of a model by a command: its name, its threads, what a waiting user reads. Part 20."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.models.checkpoint import embedded_models
from engine.models.config import ModelConfig

SMALL = 512  # hidden_size


def public_name(model: str | Path) -> str:
    """What clients are told of a model: of a folder its last name, and not where it is."""
    folder = Path(os.path.expanduser(model))
    if str(model) in embedded_models() or not folder.is_dir():
        return str(model)
    return folder.resolve().name


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Say on stderr that it is loaded, and for how long already; only to who sits at a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"Loading {public_name(model)}", total=None)
        yield


def one_thread_if_small(model: str | Path) -> None:
    """A small model is slower on two threads than on one: benchmarks, part03_kv_cache and one_request.
    Raises CheckpointError: there is no such model.
    """
    if ModelConfig.from_pretrained(model).hidden_size <= SMALL:
        import torch  # here: what is wrong with the model is said at once

        torch.set_num_threads(1)
