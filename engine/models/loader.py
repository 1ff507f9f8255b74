"""Loads a checkpoint's files into a model that is ready to run.

Promises a model with every parameter filled from the files (or, for "dummy", with random numbers), or a
`CheckpointError` that names the file, and the tensor with its shapes if one is at fault. Never unpickles
code, and never runs Python that comes with a checkpoint. Does not know any architecture, nor the formats of
files (weight_files.py). Part 1.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.machine.host_memory import available_memory
from engine.models.checkpoint import CheckpointError, first_line, resolve
from engine.models.config import AUTO, OURS, ModelConfig, architecture
from engine.models.language_model import LanguageModel
from engine.models.weight_files import NamedTensor, read_tensors
from engine.models.weights import Filler, Place, refuse_not_finite

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATION = "quantization_config"  # the entry of config.json that only a quantized checkpoint has
# model = restore(model on the meta device, the entry QUANTIZATION of config.json, tensors, folder, device):
# fills the model with the codes of a quantized checkpoint.
RestoreQuantized = Callable[[LanguageModel, dict, Iterable[NamedTensor], Path, torch.device], LanguageModel]


class Sharding(Protocol):
    """One device's part of a model that several devices share (Extension A)."""

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config of this device's part. Raises CheckpointError if the model cannot be divided so."""

    def shard(self, tensor: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
        """This device's part of a checkpoint's tensor, with the shape `shape`, which the model needs at
        `place`. The tensor itself if this device has it whole, or if it cannot be cut to `shape`.
        """


def load_model(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    transform: Callable[[LanguageModel], LanguageModel] | None = None,
    restore_quantized: RestoreQuantized | None = None,
    sharding: Sharding | None = None,
    model_impl: str = AUTO,
) -> LanguageModel:
    """Build the model `name`, an embedded name, a folder or a hub id, and fill it, ready for inference.

    - `dtype` is one of DTYPES or a torch.dtype. "auto" means float32 on a CPU, where half precision is slow,
      and the dtype of the checkpoint elsewhere.
    - `load_format` is one of LOAD_FORMATS. "auto" reads safetensors if there are any, else pytorch_model.bin.
      "dummy" fills the model with random weights (seed 0), for measurements of speed without a download.
    - `transform` changes the filled model: it packs weights (Part 3), quantizes (Part 17) or adds adapters
      (Part 18).
    - `restore_quantized` reads a quantized checkpoint: Part 17's `restore`.
    - With `sharding` only this device's part of the model is built, and only that part is read from the files
      (Extension A). The sizes in the model's `config` are then those of the part.
    - `model_impl` says whose code computes the model, as in `architecture`.

    Raises CheckpointError for a file, a tensor or too little memory, and ValueError for an argument.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: accepted are {', '.join(LOAD_FORMATS)}")
    try:
        # An empty tensor shows whether the device can be used. Its device has a number, as in "cuda:0".
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used: {first_line(error)}") from None
    folder = resolve(name, weights=load_format != "dummy")
    config = ModelConfig.from_pretrained(folder, model_impl)
    if sharding is not None:
        config = sharding.config(config)
    weight_dtype = _torch_dtype(folder, config, dtype, device)
    if load_format == "dummy":
        model = _load_dummy(folder, config, weight_dtype, device)
    else:
        tensors = list(read_tensors(folder, load_format))
        if config.raw.get(QUANTIZATION) is None:
            model = _load_weights(folder, config, weight_dtype, device, tensors, sharding)
        elif sharding is None:
            model = _load_codes(folder, config, weight_dtype, device, tensors, restore_quantized)
        else:
            raise CheckpointError(
                f"{folder}: this checkpoint is quantized, and is loaded on one device only; a plain "
                "checkpoint can be quantized on several"
            )
    model = model.eval().requires_grad_(False)
    return model if transform is None else transform(model)


def _load_dummy(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """The model with random weights. Raises ValueError if config.json is that of a quantized checkpoint, and
    CheckpointError if the memory is too small.
    """
    if config.raw.get(QUANTIZATION) is not None:
        raise ValueError(
            "load_format='dummy': this checkpoint is quantized; take a plain one, whose random weights can "
            "be quantized"
        )
    _refuse_too_large(folder, config, dtype.itemsize * _num_weights(folder, config), device)
    model = _build(folder, config, dtype, device)
    _fill_at_random(model)
    return model


def _load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: list[NamedTensor],
    sharding: Sharding | None,
) -> LanguageModel:
    """The model, or this device's part of it, filled with the weights `tensors`. For a model of ours, their
    numbers are read only after all shapes fit.

    Raises CheckpointError if the memory is too small, or if a tensor is missing or does not fit the model.
    """
    family = architecture(config.model_type, config.model_impl)
    _refuse_missing_layers(folder, config, tensors)
    _refuse_too_large(folder, config, dtype.itemsize * _num_weights(folder, config), device)
    if config.model_impl != OURS:  # the library transformers puts its tensors into their places itself
        shard_tensor = sharding.shard if sharding else None
        return family.load_weights(folder, config, dtype, device, tensors, shard_tensor)
    # 1. Check that the tensors fit, with a skeleton on the meta device, which takes no memory.
    places = family.places(config)
    skeleton = Filler(family.Model(config, device="meta", dtype=dtype), places)

    def part_of(name: str, tensor: Tensor) -> Tensor:
        """This device's part of the tensor `name`."""
        if sharding is None or name not in places:
            return tensor
        return sharding.shard(tensor, places[name], skeleton.shape(name))

    needed_tensors: list[NamedTensor] = []  # with names without PREFIX
    for file, full_name, tensor in tensors:
        name = full_name.removeprefix(family.PREFIX)
        is_redundant = name not in places and re.fullmatch(family.REDUNDANT, name)
        if not is_redundant:
            skeleton.claim(str(file), name, part_of(name, tensor.to("meta")))  # raises if it does not fit
            needed_tensors.append(NamedTensor(file, name, tensor))
    skeleton.finish(str(folder))
    # 2. Allocate the model, and copy the weights.
    model = _build(folder, config, dtype, device)
    filler = Filler(model, places)
    for file, name, tensor in needed_tensors:
        filler.fill(str(file), name, part_of(name, tensor))
    return model


def _load_codes(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: list[NamedTensor],
    restore: RestoreQuantized | None,
) -> LanguageModel:
    """The model, filled with the codes `tensors`. `dtype` is for tensors that are no codes (norms, biases).

    Raises CheckpointError if transformers computes the model, if there is no `restore`, if the memory is too
    small, or if a tensor is missing or does not fit the model.
    """
    if config.model_impl != OURS:
        raise CheckpointError(
            f"{folder}: this checkpoint is quantized, and {config.model_type} is computed by "
            f"{config.model_impl}; a plain checkpoint can be quantized at load (quantization='int8')"
        )
    _refuse_missing_layers(folder, config, tensors)
    if restore is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: has a {QUANTIZATION!r}: to read it, hand `restore` of Part 17's "
            "engine.quantization.checkpoint to load_model as restore_quantized="
        )
    fewest_bytes = _num_weights(folder, config) // 2  # a weight takes at least four bits
    num_bytes = max(fewest_bytes, sum(tensor.nbytes for _, _, tensor in tensors))
    _refuse_too_large(folder, config, num_bytes, device)
    skeleton = architecture(config.model_type, config.model_impl).Model(config, device="meta", dtype=dtype)
    return restore(skeleton, config.raw[QUANTIZATION], _check_finite(tensors), folder, device)


def _refuse_missing_layers(folder: Path, config: ModelConfig, tensors: list[NamedTensor]) -> None:
    """Raises CheckpointError if config.json has more layers than the files have tensors.

    This check comes first, because an absurd number of layers would make the next checks slow.
    """
    if config.num_layers > len(tensors):
        raise CheckpointError(
            f"{folder / 'config.json'}: num_layers={config.num_layers}, and the files hold {len(tensors)} "
            "tensors"
        )


def _num_weights(folder: Path, config: ModelConfig) -> int:
    """The number of weights of the model, counted on the meta device, which takes no memory. The layers of
    our own models are alike, so one of them is counted.

    Raises CheckpointError if the sizes in config.json are too large for torch.
    """
    family = architecture(config.model_type, config.model_impl)
    if config.model_impl != OURS:
        return family.num_weights(config)
    one_layer_config = dataclasses.replace(config, num_layers=1)
    try:
        model = family.Model(one_layer_config, device="meta")
    except RuntimeError as error:  # the product of two sizes overflows torch's 64 bits
        raise CheckpointError(f"{folder / 'config.json'}: {first_line(error)}") from None
    per_layer = sum(parameter.numel() for parameter in model.blocks.parameters())
    with_one_layer = sum(parameter.numel() for parameter in model.parameters())
    return with_one_layer + (config.num_layers - 1) * per_layer


def _refuse_too_large(folder: Path, config: ModelConfig, num_bytes: int, device: torch.device) -> None:
    """Raises CheckpointError if the weights need more bytes than the device has free. Names both numbers, and
    what would help.

    Only the CPU and CUDA devices are checked.
    """
    free: int | None = None  # bytes; None: not known
    if device.type == "cpu":
        free = available_memory()
    elif device.type == "cuda":
        # Torch keeps the memory of deleted tensors for later tensors, so this memory counts as free.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        unused, _ = torch.cuda.mem_get_info(device)
        free = unused + cached
    if free is not None and num_bytes > free:
        raise CheckpointError(
            f"{folder / 'config.json'}: this model's weights need {num_bytes:,} bytes of memory, and "
            f"{device} has {free:,} free; a smaller model, a dtype of fewer bytes (dtype='bfloat16') or more "
            "free memory is accepted"
        )


def _build(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Allocate the model, without filling it. Raises CheckpointError if there is not enough memory."""
    try:
        return architecture(config.model_type, config.model_impl).Model(config, device=device, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{folder}: no memory for this model's weights on {device}: {first_line(error)}"
        ) from None


def _check_finite(tensors: list[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors, and check each one first.

    Raises CheckpointError, which names the tensor, if one of its numbers is not finite.
    """
    for file, name, tensor in tensors:
        refuse_not_finite(str(file), name, tensor)
        yield NamedTensor(file, name, tensor)


def _torch_dtype(
    folder: Path, config: ModelConfig, dtype: str | torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of the weights. Raises ValueError if `dtype` is a string that is not in DTYPES, and
    CheckpointError if it is "auto" and the checkpoint's dtype is not of floating point.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    if dtype != "auto":
        name = dtype
    elif device.type == "cpu":
        name = "float32"
    else:
        name = config.dtype or "float32"
    torch_dtype = getattr(torch, str(name), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise CheckpointError(
            f"{folder / 'config.json'}: dtype={name!r:.40}: a floating point dtype is accepted"
        )
    return torch_dtype


@torch.no_grad()
def _fill_at_random(model: nn.Module) -> None:
    """Fill the model as before its training: small random weights, biases of 0, and norm gains of 1."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            is_bias = name.endswith("bias")  # any other vector is the gain of a norm
            parameter.fill_(0.0 if is_bias else 1.0)
