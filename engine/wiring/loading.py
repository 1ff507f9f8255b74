"""What a command does beside loading a model: names it, shows that it waits, sets its threads. Part 20."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.models.checkpoint import embedded_models
from engine.models.config import ModelConfig

SMALL_HIDDEN_SIZE = 512  # up to which a model is faster on one thread than on two


def public_name(model: str | Path) -> str:
    """The name of a model for clients; of a folder only the last part of its path."""
    folder = Path(os.path.expanduser(model))
    if str(model) in embedded_models() or not folder.is_dir():
        return str(model)
    return folder.resolve().name


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """While the model is loaded, show on stderr its name and the seconds so far, if that is a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"Loading {public_name(model)}", total=None)
        yield


def one_thread_if_small(model: str | Path) -> None:
    """Have PyTorch compute on one thread if the model is small: it is slower on two (the benchmarks
    part03_kv_cache and one_request). Raises CheckpointError: there is no such model.
    """
    if ModelConfig.from_pretrained(model).hidden_size <= SMALL_HIDDEN_SIZE:
        import torch  # here: an error in the model's name is said before this slow import

        torch.set_num_threads(1)
