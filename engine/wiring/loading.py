"""Helpers for commands that load a model: its public name, a spinner, PyTorch's threads, and which package
computes it. Part 20.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.models.checkpoint import embedded_models
from engine.models.config import AUTO, OURS, ModelConfig

SMALL_HIDDEN_SIZE = 512  # up to this hidden size, a model runs faster on one thread than on two


def public_name(model: str | Path) -> str:
    """The name under which clients see a model. A model in a folder gets the last part of the folder's path,
    so that clients do not learn the path.
    """
    folder = Path(os.path.expanduser(model))
    if str(model) in embedded_models() or not folder.is_dir():
        return str(model)
    return folder.resolve().name


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Show the model's name and the seconds so far on stderr inside the block, if stderr is a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(f"Loading {public_name(model)}", total=None)
        yield


def one_thread_if_small(model: str | Path, model_impl: str = AUTO) -> None:
    """Make PyTorch compute on one thread if the model's hidden size is at most SMALL_HIDDEN_SIZE. The
    benchmarks part03_kv_cache and one_request show that such a model is slower on two threads.

    Raises CheckpointError if the model cannot be found.
    """
    if ModelConfig.from_pretrained(model, model_impl).hidden_size <= SMALL_HIDDEN_SIZE:
        import torch  # imported here, so that an error in the model's name comes before this slow import

        torch.set_num_threads(1)


def describe_implementation(config: ModelConfig) -> str:
    """The architecture and the package that computes it, such as "llama by ruvon", or "mixtral by
    transformers, without CUDA graphs".
    """
    limitation = "" if config.model_impl == OURS else ", without CUDA graphs"
    return f"{config.model_type} by {config.model_impl}{limitation}"
