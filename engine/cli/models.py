"""`ruvon models`: lists the models that `--model` may name on this machine. Part 20's wiring.

The command reads configurations and the headers of weight files, but no weights. It does not use the network.
"""

import json
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.models.checkpoint import CheckpointError, embedded_models, resolve
from engine.models.config import OURS, ModelConfig, architectures
from engine.models.known_shapes import known_shapes


def models() -> None:
    """List embedded models, models in the Hugging Face hub's cache, and the architectures that run."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("--model", no_wrap=True)
    for name in ("architecture", "parameters", "layers", "width", "vocabulary", "context", "MB"):
        table.add_column(name, justify="left" if name == "architecture" else "right")
    for name in embedded_models():
        table.add_row(name, *_row(name))
    unsupported: dict[str, str] = {}  # name of a model -> why it cannot be run
    for name in cached_models():
        try:
            table.add_row(name, *_row(name))
        except (CheckpointError, KeyError, ValueError) as error:
            unsupported[name] = str(error)
    console.print(table)
    for name, why in unsupported.items():
        console.print(f"{name}: in the hub's cache, and not to be run: {why}", markup=False, style="dim")
    console.print(f"\nWith --load-format dummy, random weights in the shape of: {', '.join(known_shapes())}.")
    names = ", ".join(architectures())
    console.print(f"Architectures: {names}. A folder with such a checkpoint will do, or a hub id (gpt2).")


def cached_models() -> list[str]:
    """The hub ids of the models in the Hugging Face hub's cache on this machine, sorted."""
    from huggingface_hub import CacheNotFound, scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        repos = scan_cache_dir(HF_HUB_CACHE).repos
    except (CacheNotFound, OSError):
        return []
    downloaded = [repo for repo in repos if repo.repo_type == "model"]
    return sorted(repo.repo_id for repo in downloaded if _snapshot(repo.repo_path))


def _snapshot(folder: Path) -> Path | None:
    """The folder with a downloaded model's files, or None if there is no config.json. Of several downloaded
    versions, this is any one.
    """
    for config in Path(folder).glob("snapshots/*/config.json"):
        return config.parent
    return None


def _row(name: str) -> list[str]:
    """The cells of the table after the model's name. Raises CheckpointError, KeyError or ValueError if the
    model cannot be run.
    """
    folder = _folder_of(name)
    config = ModelConfig.from_pretrained(folder)
    architecture = config.model_type
    if config.model_impl != OURS:
        architecture += f" ({config.model_impl})"
    num_parameters = megabytes = "–"
    files = list(folder.glob("*.safetensors"))
    if files:
        num_parameters = f"{sum(map(_num_parameters, files)):,}"
        megabytes = f"{sum(file.stat().st_size for file in files) / 1e6:,.1f}"
    return [
        architecture,
        num_parameters,
        f"{config.num_layers}",
        f"{config.hidden_size:,}",
        f"{config.vocab_size:,}",
        f"{config.max_positions:,}",
        megabytes,
    ]


def _folder_of(name: str) -> Path:
    """The folder of an embedded or a downloaded model, found without asking the hub."""
    if name in embedded_models():
        return resolve(name)
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = _snapshot(Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}")
    assert folder is not None  # `cached_models` names only models that have such a folder
    return folder


def _num_parameters(file: Path) -> int:
    """How many numbers a safetensors file contains, read from the file's header: 8 bytes with the length of
    the JSON that follows them, and then that JSON.
    """
    with file.open("rb") as opened:
        num_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(num_bytes))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            total += math.prod(tensor["shape"])
    return total
