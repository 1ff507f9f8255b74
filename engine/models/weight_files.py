"""Reads the tensors in a checkpoint's files: safetensors or PyTorch pickles, whole or sharded. Part 1.

Promises every tensor of the files, and each that an index lists, or a `CheckpointError` that names the file.
Only tensors are unpickled, and never code. Does not know models: loader.py puts the tensors into their
places.
"""

import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.checkpoint import CheckpointError, read_json


class NamedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    file: Path  # in which it is
    name: str  # its name in the file
    tensor: Tensor


def read_tensors(folder: Path, file_format: str) -> Iterator[NamedTensor]:
    """Yield every (file, name, tensor) of the checkpoint in `folder`. `file_format`: "safetensors", "pt", or
    "auto", which takes safetensors if there are any.

    The files are mapped into memory, so the numbers of a tensor are read only when they are copied. A
    pytorch_model.bin from before torch 1.6 cannot be mapped, and is read at once. Raises CheckpointError if
    there are no weights in this format, or if a file is missing or damaged, and KeyError for another
    `file_format`.
    """
    formats = {
        "safetensors": ("model.safetensors", _read_safetensors),
        "pt": ("pytorch_model.bin", _read_pickle),
    }
    candidates = list(formats.values()) if file_format == "auto" else [formats[file_format]]
    for file_name, read in candidates:
        files = _files_of(folder, file_name)
        for file, names in files.items():
            _refuse_unreadable(file)
            yield from read(file, names)
        if files:
            return
    raise CheckpointError(
        f"{folder}: no weights; looked for {', '.join(name for name, _ in candidates)}, whole or sharded"
    )


def _files_of(folder: Path, file_name: str) -> Mapping[Path, list[str] | None]:
    """The files with weights, each with the names of the tensors that it must hold, or None without an index.

    The index lists the tensors of several files. Without it, the weights are in the file `file_name`. Empty
    if the folder has neither.
    """
    index = folder / f"{file_name}.index.json"
    if index.exists():
        return _shards(index)
    if (folder / file_name).is_file():
        return {folder / file_name: None}
    return {}


def _shards(index: Path) -> dict[Path, list[str]]:
    """The names of the tensors that each file of a sharded checkpoint must hold, from its index.

    Raises CheckpointError if the index is damaged, names a file outside its folder, or names a missing file.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no 'weight_map'")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file == ".." or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file!r}, outside the folder")
        shards.setdefault(index.parent / file, []).append(name)
    for file in shards:
        try:
            exists = file.is_file()
        except OSError as error:  # for example, a file name that is too long
            raise CheckpointError(f"{index}: {file.name!s:.80}: {error.strerror}") from None
        if not exists:
            raise CheckpointError(f"{file}: no such file, though {index.name} names it")
    return shards


def _refuse_unreadable(file: Path) -> None:
    """Raises CheckpointError with the system's message if the file cannot be opened.

    Without this check, the readers of tensors would report the file as damaged.
    """
    try:
        file.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def _read_safetensors(file: Path, names: list[str] | None) -> Iterator[NamedTensor]:
    """Yield every (file, name, tensor) of a safetensors file.

    `names` are the tensors that the index lists for the file, or None if there is no index. Raises
    CheckpointError if the file is damaged or lacks one of `names`.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            _refuse_missing(file, names, tensors.keys())
            for name in tensors.keys():  # noqa: SIM118  # `tensors` is an open file, and cannot be iterated
                yield NamedTensor(file, name, tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None


def _read_pickle(file: Path, names: list[str] | None) -> Iterator[NamedTensor]:
    """Yield every (file, name, tensor) of a PyTorch pickle, of which only tensors are unpickled.

    `names` and errors are as in `_read_safetensors`.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: truncated, or holds more than tensors ({error})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file}: holds {type(tensors).__name__}, not a dictionary of tensors")
    _refuse_missing(file, names, tensors)
    for name, tensor in tensors.items():
        yield NamedTensor(file, name, tensor)


def _refuse_missing(file: Path, names: list[str] | None, in_file: Iterable[str]) -> None:
    """Raises CheckpointError if one of `names` is not in the file. `names` is None without an index."""
    missing = set(names or ()) - set(in_file)
    if missing:
        raise CheckpointError(f"{file}: missing tensor {sorted(missing)[0]!r}, which the index says is here")
