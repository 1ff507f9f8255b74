"""From a checkpoint's files to a model that can run.

Promises a model whose every parameter was filled from the files, or a `CheckpointError` that names file,
tensor and shapes. Never unpickles code, never runs a checkpoint's own Python. Does not know any architecture.
Part 1.
"""

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.checkpoint import CheckpointError, read_json, resolve
from engine.config import ModelConfig, architecture
from engine.models.weights import Filler

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
CODES = "quantization_config"  # an entry of config.json
DTYPES = ("auto", "float32", "float16", "bfloat16")


def load_model(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    transform: Callable[[nn.Module], nn.Module] | None = None,
) -> nn.Module:
    """Build and fill the model `name` (an embedded name, a folder or a hub id), ready for inference.

    dtype "auto" is float32 on a CPU, where half precision is slow, and the checkpoint's own elsewhere.
    load_format: "auto" takes safetensors, else pytorch_model.bin ("pt"); "dummy" draws random weights in the
    true shape (seed 0), for speed work without a download. `transform` changes the finished model: packed
    weights (Part 3), quantization (17), adapters (18).

    Raises CheckpointError (a file or tensor), ValueError (an argument).
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: accepted are {', '.join(LOAD_FORMATS)}")
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    folder = resolve(name, weights=load_format != "dummy")
    config = ModelConfig.from_pretrained(folder)
    home = architecture(config.model_type)
    codes = config.raw.get(CODES)  # what fills the model is not weights, but codes (Part 17)
    place = device if codes is None else "meta"
    model = home.Model(config, device=place, dtype=_dtype(dtype, config, device))
    if codes is not None:
        if load_format == "dummy":
            raise ValueError(
                "load_format='dummy': this checkpoint is quantized; quantize a plain one's noise"
            )
        model = _reader(folder).restore(model, codes, _tensors(folder, load_format), folder, device)
    elif load_format == "dummy":
        _fill_with_noise(model)
    else:
        filler = Filler(model, home.places(config))
        for file, tensor_name, tensor in _tensors(folder, load_format):
            tensor_name = tensor_name.removeprefix(home.PREFIX)
            if tensor_name in filler.places or not re.fullmatch(home.REDUNDANT, tensor_name):
                filler.fill(str(file), tensor_name, tensor)
        filler.finish(str(folder))
    model = model.eval().requires_grad_(False)
    return transform(model) if transform else model


def _reader(folder: Path) -> ModuleType:
    """Who reads such codes, found by the entry's name: `NAME_config` is read by engine/NAME/checkpoint.py."""
    package = f"engine.{CODES.removesuffix('_config')}"
    try:
        return import_module(f"{package}.checkpoint")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.checkpoint"):
            raise  # it is there, and lacks something itself
        raise CheckpointError(
            f"{folder / 'config.json'}: has a {CODES!r}, which comes with Part 17"
        ) from None


def _dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else config.dtype or "float32"
    return getattr(torch, dtype)


@torch.no_grad()
def _fill_with_noise(model: nn.Module) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # a bias, or a norm's scale


def _tensors(folder: Path, load_format: str) -> Iterator[tuple[Path, str, Tensor]]:
    """Every (file, name, tensor) of a checkpoint, one tensor in memory at a time where the format allows."""
    formats = {
        "safetensors": ("model.safetensors", _read_safetensors),
        "pt": ("pytorch_model.bin", _read_pickle),
    }
    wanted = formats.values() if load_format == "auto" else [formats[load_format]]
    for single, read in wanted:
        index = folder / f"{single}.index.json"
        if index.exists():
            shards = _shards(index)
        elif (folder / single).is_file():
            shards = {folder / single: None}
        else:
            continue
        for file, names in shards.items():
            _open(file)
            yield from read(file, names)
        return
    raise CheckpointError(
        f"{folder}: no weights; looked for {', '.join(single for single, _ in wanted)}, whole or sharded"
    )


def _shards(index: Path) -> dict[Path, list[str]]:
    """Which tensors each file of a sharded checkpoint must hold."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no 'weight_map'")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file == ".." or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file!r}, outside the folder")
        shards.setdefault(index.parent / file, []).append(name)
    for file in shards:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file, though {index.name} names it")
    return shards


def _open(file: Path) -> None:
    """Fail here, in the system's own words, where a reader of tensors would call the file damaged."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def _read_safetensors(file: Path, names: list[str] | None) -> Iterator[tuple[Path, str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            held = tensors.keys()
            _check_listed(file, names, held)
            for name in held:
                yield file, name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None


def _read_pickle(file: Path, names: list[str] | None) -> Iterator[tuple[Path, str, Tensor]]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: truncated, or holds more than tensors ({error})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file}: holds {type(tensors).__name__}, not a dictionary of tensors")
    _check_listed(file, names, tensors)
    for name, tensor in tensors.items():
        yield file, name, tensor


def _check_listed(file: Path, names: list[str] | None, held) -> None:
    missing = set(names or ()) - set(held)
    if missing:
        raise CheckpointError(f"{file}: missing tensor {sorted(missing)[0]!r}, which the index says is here")
