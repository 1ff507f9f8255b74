"""A quantized model as a folder: written once, and loaded without weights in full precision. Part 17.

    python -m engine.quantization.checkpoint storyteller out/storyteller-int4 --quantization int4
    model = load_model("out/storyteller-int4", restore_quantized=restore)

Promises a Hugging Face folder: config.json with a `quantization_config`, model.safetensors with the codes,
and the tokenizer's files. While a folder is loaded, the weights of quantized layers are never in memory in
full precision. Tensors have this engine's names (`blocks.0.mlp.up.nibbles`), since no other program reads
these codes.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.layers.replace import AnyModel
from engine.models.checkpoint import SMALL_FILES, CheckpointError, read_json, resolve
from engine.quantization.layers import LINEARS, QuantizedLinear
from engine.quantization.quantize import (
    QuantizationConfig,
    is_tied,
    quantization_of,
    quantize,
    skeleton,
    tie,
)

WEIGHTS = "model.safetensors"


def save_quantized(model: nn.Module, source: str | Path, folder: str | Path) -> Path:
    """Write a quantized model into `folder`, and return the folder.

    `source`: the original model, as `load_model` takes it; its tokenizer and settings are copied.

    Raises ValueError if the model is not quantized, if the model is packed already, or if `folder` is a file
    or not empty, and CheckpointError if `source` cannot be read.
    """
    config = quantization_of(model)
    if config is None:
        raise ValueError("model is not quantized: `quantize` it first")
    if any(isinstance(layer, QuantizedLinear) and layer.product is not None for layer in model.modules()):
        raise ValueError("model is packed for a kernel: save it before `pack_quantized`")
    source, folder = resolve(source), Path(folder)
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise ValueError(f"{folder}: an empty folder is accepted, or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
    settings = read_json(source / "config.json") | {"quantization_config": config.as_json()}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def restore(
    model: AnyModel, raw: dict, tensors: Iterable[tuple[Path, str, Tensor]], folder: Path,
    device: torch.device,
) -> AnyModel:  # fmt: skip
    """Fill a model on the meta device from a folder that `save_quantized` wrote; returns the model. Used as
    `load_model(restore_quantized=)`.

    `raw`: the field `quantization_config` of config.json. `tensors`: (file, name, tensor) of each tensor in
    the folder. `device`: where the model's tensors go.

    Raises CheckpointError if `raw` is not valid or the method does not run on `device`, and if a tensor is
    missing, has no place in the model, or has another shape or dtype than the model's.
    """
    try:
        config = QuantizationConfig.from_json(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    if config.method == "int8_dynamic" and device.type != "cpu":
        raise CheckpointError(f"{folder}: int8_dynamic runs on a CPU, not on {device}: use int8 there")
    skeleton(model, config)
    model.to_empty(device=device)
    tie(model)  # again, since `to_empty` gives each tensor, also a shared one, memory of its own
    targets = _tensors(model)
    missing = set(targets)
    for file, name, tensor in tensors:
        if name not in targets:
            raise CheckpointError(f"{file}: tensor {name!r} has no place in this model")
        _refuse_unlike(file, name, tensor, targets[name])
        with torch.no_grad():
            targets[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{folder}: missing tensor {sorted(missing)[0]!r}, one of {len(missing)}")
    return model


def _refuse_unlike(file: Path, name: str, tensor: Tensor, target: Tensor) -> None:
    """Raise CheckpointError if a file's tensor has another shape than the model's `target`, or another dtype.
    Floating-point numbers of any dtype are accepted for floating-point numbers; codes are not converted.
    """
    if tensor.shape != target.shape:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(target.shape)}"
        )
    both_float = tensor.is_floating_point() and target.is_floating_point()
    if not both_float and tensor.dtype != target.dtype:
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}, the model needs {target.dtype}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of the model by name. A tied head shares the embedding's codes, which are listed once."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if is_tied(model):
        for name in ("head.codes", "head.scale"):
            tensors.pop(name, None)  # `named_buffers` leaves out a tensor that it has listed already
    return {name: tensor.detach() for name, tensor in tensors.items()}


def main(arguments: list[str] | None = None) -> None:
    """The command `python -m engine.quantization.checkpoint MODEL FOLDER --quantization int8`. A model or an
    argument that is refused, or a file that cannot be written, ends the program with the error's message.
    """
    from engine.models.loader import load_model

    parser = argparse.ArgumentParser(description="Write a model's quantized checkpoint.")
    parser.add_argument("model", help="an embedded model, a folder, or a hub id")
    parser.add_argument("folder", type=Path, help="where to: new, or empty")
    parser.add_argument("--quantization", choices=LINEARS, required=True)
    parser.add_argument("--group-size", type=int, help="int4: weights that share a scale; default: 64")
    options = parser.parse_args(arguments)
    try:
        model = load_model(
            options.model,
            transform=lambda model: quantize(model, options.quantization, options.group_size),
            restore_quantized=restore,
        )
        folder = save_quantized(model, options.model, options.folder)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"{folder}: {(folder / WEIGHTS).stat().st_size:,} bytes of weights")


if __name__ == "__main__":
    main()
