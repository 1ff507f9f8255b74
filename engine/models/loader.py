"""From a checkpoint's files to a model that can run.

Promises a model whose every parameter was filled from the files, or a `CheckpointError` that names file,
tensor and shapes. Never unpickles code, never runs a checkpoint's own Python. Does not know any architecture.
Part 1.
"""

import dataclasses
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.machine.host_memory import available_memory
from engine.models.checkpoint import CheckpointError, read_json, resolve
from engine.models.config import ModelConfig, architecture
from engine.models.language_model import LanguageModel
from engine.models.weights import Filler, refuse_not_finite

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
CODES = "quantization_config"  # config.json has this entry if the checkpoint holds codes, not weights
NamedTensor = tuple[Path, str, Tensor]  # the file it is in, and its name there
# Fills a model on the meta device with codes: (model, config.json's entry CODES, tensors, folder, device) ->
# the model.
RestoreQuantized = Callable[[LanguageModel, dict, Iterable[NamedTensor], Path, torch.device], LanguageModel]


def load_model(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    transform: Callable[[LanguageModel], LanguageModel] | None = None,
    restore_quantized: RestoreQuantized | None = None,
) -> LanguageModel:
    """Build and fill the model `name` (an embedded name, a folder or a hub id), ready for inference.

    dtype "auto" is float32 on a CPU, where half precision is slow, and the checkpoint's own elsewhere.
    load_format: "auto" takes safetensors, else pytorch_model.bin ("pt"); "dummy" draws random weights in the
    true shape (seed 0), for speed work without a download. `transform` changes the finished model: packed
    weights (Part 3), quantization (17), adapters (18). `restore_quantized` reads a checkpoint of codes:
    Part 17's `restore`.

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
    weight_dtype, is_quantized = _torch_dtype(dtype, config, device), config.raw.get(CODES) is not None
    if load_format == "dummy":
        if is_quantized:
            raise ValueError(
                "load_format='dummy': this checkpoint is quantized; quantize a plain one's noise"
            )
        _refuse_too_large(folder, config, weight_dtype.itemsize * _num_weights(folder, config), device)
        model = _build(folder, config, weight_dtype, device)
        _fill_with_noise(model)
    else:
        tensors = list(_read_tensors(folder, load_format))
        if is_quantized:
            model = _load_codes(folder, config, weight_dtype, device, tensors, restore_quantized)
        else:
            model = _load_weights(folder, config, weight_dtype, device, tensors)
    model = model.eval().requires_grad_(False)
    return transform(model) if transform else model


def _load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, tensors: list[NamedTensor]
) -> LanguageModel:
    """The model with these weights. Until it is clear that all tensors fit, only their shapes are read."""
    family = architecture(config.model_type)
    # 1. Check that what config.json says fits this machine and the files' tensors. No memory is taken yet.
    _refuse_missing_layers(folder, config, tensors)
    _refuse_too_large(folder, config, dtype.itemsize * _num_weights(folder, config), device)
    places, used = family.places(config), []
    skeleton = Filler(family.Model(config, device="meta", dtype=dtype), places)
    for file, name, tensor in tensors:
        name = name.removeprefix(family.PREFIX)
        if name in places or not re.fullmatch(family.REDUNDANT, name):
            skeleton.target(str(file), name, tensor)
            used.append((str(file), name, tensor))
    skeleton.finish(str(folder))
    # 2. The model, and its weights.
    model = _build(folder, config, dtype, device)
    filler = Filler(model, places)
    for file_name, name, tensor in used:
        filler.fill(file_name, name, tensor)
    return model


def _load_codes(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: list[NamedTensor],
    restore: RestoreQuantized | None,
) -> LanguageModel:
    """The model with these codes. `dtype`: of the tensors that are no codes (norms, biases)."""
    _refuse_missing_layers(folder, config, tensors)
    if restore is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: has a {CODES!r}: to read it, hand `restore` of Part 17's "
            "engine.quantization.checkpoint to load_model as restore_quantized="
        )
    fewest_bytes = _num_weights(folder, config) // 2  # at four bits a weight
    num_bytes = max(fewest_bytes, sum(tensor.nbytes for _, _, tensor in tensors))
    _refuse_too_large(folder, config, num_bytes, device)
    skeleton = architecture(config.model_type).Model(config, device="meta", dtype=dtype)
    return restore(skeleton, config.raw[CODES], _check_finite(tensors), folder, device)


def _refuse_missing_layers(folder: Path, config: ModelConfig, tensors: list[NamedTensor]) -> None:
    """Raises CheckpointError: config.json has more layers than the files have tensors. So an absurd number of
    layers is refused before anything is computed from it.
    """
    if config.num_layers > len(tensors):
        raise CheckpointError(
            f"{folder / 'config.json'}: num_layers={config.num_layers}, and the files hold {len(tensors)} "
            "tensors"
        )


def _num_weights(folder: Path, config: ModelConfig) -> int:
    """How many weights the model has. Counted on a model of one layer, on the meta device: it takes no
    memory.
    """
    try:
        model = architecture(config.model_type).Model(
            dataclasses.replace(config, num_layers=1), device="meta"
        )
    except RuntimeError as error:  # torch multiplies sizes in 64 bits
        raise CheckpointError(f"{folder / 'config.json'}: {str(error).splitlines()[0]}") from None
    layer = sum(parameter.numel() for parameter in model.blocks.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) + (config.num_layers - 1) * layer


def _refuse_too_large(folder: Path, config: ModelConfig, num_bytes: int, device: torch.device) -> None:
    """Raises CheckpointError with both numbers: the weights need more memory than there is."""
    if device.type == "cuda":
        # Torch holds memory of deleted tensors for later tensors, so this memory is free, too.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free: int | None = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = available_memory() if device.type == "cpu" else None
    if free is not None and num_bytes > free:
        raise CheckpointError(
            f"{folder / 'config.json'}: this model's weights need {num_bytes:,} bytes of memory, and "
            f"{device} has {free:,} free"
        )


def _build(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """The model, not filled yet. Raises CheckpointError: its memory could not be allocated."""
    try:
        return architecture(config.model_type).Model(config, device=device, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        reason, *_ = str(error).splitlines() or [""]
        raise CheckpointError(f"{folder}: no memory for this model's weights on {device}: {reason}") from None


def _check_finite(tensors: list[NamedTensor]) -> Iterator[NamedTensor]:
    """These tensors, each checked as it is taken. Raises CheckpointError naming one that is not finite."""
    for file, name, tensor in tensors:
        refuse_not_finite(str(file), name, tensor)
        yield file, name, tensor


def _torch_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of the weights. Raises ValueError: `dtype` is none of DTYPES."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else config.dtype or "float32"
    return getattr(torch, dtype)


@torch.no_grad()
def _fill_with_noise(model: nn.Module) -> None:
    """Small random weights, biases of 0 and gains of 1, as before training."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # a bias, or a norm's gain


def _read_tensors(folder: Path, load_format: str) -> Iterator[NamedTensor]:
    """Every (file, name, tensor) of a checkpoint. The files are mapped into memory: a tensor's numbers are
    read when they are copied. (A pytorch_model.bin of before torch 1.6 cannot be mapped, and is read at
    once.)
    """
    formats = {
        "safetensors": ("model.safetensors", _read_safetensors),
        "pt": ("pytorch_model.bin", _read_pickle),
    }
    wanted = formats.values() if load_format == "auto" else [formats[load_format]]
    shards: Mapping[Path, list[str] | None]
    for single, read in wanted:
        index = folder / f"{single}.index.json"
        if index.exists():
            shards = _shards(index)
        elif (folder / single).is_file():
            shards = {folder / single: None}  # None: all tensors in it
        else:
            continue
        for file, names in shards.items():
            _check_readable(file)
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
        try:
            exists = file.is_file()
        except OSError as error:  # a name that is too long
            raise CheckpointError(f"{index}: {file.name!s:.80}: {error.strerror}") from None
        if not exists:
            raise CheckpointError(f"{file}: no such file, though {index.name} names it")
    return shards


def _check_readable(file: Path) -> None:
    """Raises CheckpointError in the system's words, where a reader of tensors would call the file damaged."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def _read_safetensors(file: Path, names: list[str] | None) -> Iterator[NamedTensor]:
    """The tensors of a file. `names`: those that the index says are in it. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            _check_listed(file, names, tensors.keys())
            for name in tensors.keys():  # noqa: SIM118  # a file that is open, not a dictionary
                yield file, name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None


def _read_pickle(file: Path, names: list[str] | None) -> Iterator[NamedTensor]:
    """As `_read_safetensors`; only tensors are unpickled."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: truncated, or holds more than tensors ({error})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file}: holds {type(tensors).__name__}, not a dictionary of tensors")
    _check_listed(file, names, tensors)
    for name, tensor in tensors.items():
        yield file, name, tensor


def _check_listed(file: Path, names: list[str] | None, in_file: Iterable[str]) -> None:
    """Raises CheckpointError: the file lacks one of `names`, which an index lists for it (None: no index)."""
    missing = set(names or ()) - set(in_file)
    if missing:
        raise CheckpointError(f"{file}: missing tensor {sorted(missing)[0]!r}, which the index says is here")
