"""An adapter in memory: for each linear layer it changes, two thin matrices. Part 18.

LoRA leaves a layer's weight W[out, in] as it is and learns a difference of low rank: W + scale · B·A with
A[r, in] and B[out, r]. Reads PEFT's format: adapter_config.json and adapter_model.safetensors. Promises that
every tensor in the file found its place, that none is missing, and that all numbers are finite; or a
`CheckpointError` in words. Never unpickles. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.lora.config import EXPRESSION_SECONDS, AdapterConfig, read_config
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig, architecture

WRAPPED = "base_model.model."  # what PEFT puts before the names of the model it wraps
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Factors:
    """The difference that an adapter makes to some output rows of a linear layer."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    rows: slice | None = None  # of the layer's weight: those of the query, say, where several are one layer


@dataclass(frozen=True)
class Adapter:
    """All differences of one adapter, to be multiplied by `scale`."""

    rank: int
    scale: float
    layers: dict[str, tuple[Factors, ...]]  # by the dotted name of our linear layer
    folder: str = ""  # where it was read


@dataclass(frozen=True)
class Target:
    """A linear layer as Hugging Face has it, and where it is here."""

    layer: str  # our linear layer's dotted name
    rows: slice | None
    shape: tuple[int, int]  # out, in


@lru_cache(maxsize=8)  # a swap asks each time, and it is always the same model's
def targets_of(config: ModelConfig) -> dict[str, Target]:
    """Every linear layer that an adapter may change, by Hugging Face's name: all but the output layer, which
    sees other rows than the rest of the model does.
    """
    family = architecture(config.model_type)
    model = family.Model(config, device="meta")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = {}
    for name, place in family.places(config).items():
        layer, _, leaf = place.parameter.rpartition(".")
        if leaf == "weight" and layer != "head" and isinstance(model.get_submodule(layer), nn.Linear):
            weight = parameters[place.parameter]
            weight = weight if place.rows is None else weight[place.rows]
            targets[name.removesuffix(".weight")] = Target(layer, place.rows, tuple(weight.shape))
    return targets


def read_adapter(folder: str | Path, config: ModelConfig, max_rank: int | None = None) -> Adapter:
    """The adapter in `folder`, for a model of this shape, in fp32 on the CPU.

    Raises CheckpointError: a file is missing, damaged, or asks for what is not computed here; a rank above
    `max_rank`; a tensor that has no place in this model, the wrong shape, or numbers that are not finite.
    """
    folder = Path(os.path.expanduser(folder))
    settings = read_config(folder)
    if max_rank is not None and settings.r > max_rank:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: r={settings.r}: at most max_lora_rank={max_rank} is accepted"
        )
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        hint = "; adapter_model.bin may hold code: save it as safetensors"
        raise CheckpointError(
            f"{file}: no such file{hint if (folder / 'adapter_model.bin').exists() else ''}"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            layers = _placed(file, tensors, settings, config)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None
    return Adapter(settings.r, settings.scale, layers, str(folder.resolve()))


def _placed(
    file: Path, tensors: safe_open, settings: AdapterConfig, config: ModelConfig
) -> dict[str, tuple[Factors, ...]]:
    """The tensors by our layers' names, once each has found its place. Raises CheckpointError."""
    targets, prefix = targets_of(config), architecture(config.model_type).PREFIX
    pairs: dict[str, dict[str, Tensor]] = {}  # by Hugging Face's module: its "A" and "B"
    names = list(tensors.keys())
    try:
        adapted = settings.targets({outer + module for module in targets for outer in ("", prefix)})
    except TimeoutError:
        raise CheckpointError(
            f"{file.parent / 'adapter_config.json'}: target_modules={settings.target_modules!r:.80}: an "
            f"expression that takes at most {EXPRESSION_SECONDS:g} seconds for all names is accepted"
        ) from None
    # 1. Each tensor is A or B of a linear layer there is, and its shape fits. Shapes are known unread.
    for name in names:
        match = FACTOR.fullmatch(name.removeprefix(WRAPPED))
        path, factor = match.groups() if match else ("", "")
        module = path.removeprefix(prefix)
        if not name.startswith(WRAPPED) or module not in targets or path not in adapted:
            raise CheckpointError(f"{file}: tensor {name!r} belongs to no linear layer that is adapted here")
        out, into = targets[module].shape
        needed = (settings.r, into) if factor == "A" else (out, settings.r)
        shape = tuple(tensors.get_slice(name).get_shape())
        if shape != needed:
            raise CheckpointError(f"{file}: tensor {name!r} has shape {shape}, the model needs {needed}")
        tensor = tensors.get_tensor(name)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(
                f"{file}: tensor {name!r} ({tensor.dtype}): finite floating point is accepted"
            )
        pairs.setdefault(module, {})[factor] = tensor.to(torch.float32)
    # 2. Nothing is missing: what the settings name is there, and each A has its B.
    outer = prefix if any(name.startswith(WRAPPED + prefix) for name in names) else ""
    for module in targets:
        missing = {"A", "B"} - pairs.get(module, {}).keys()
        if missing and outer + module in adapted:
            name = f"{WRAPPED}{outer}{module}.lora_{min(missing)}.weight"
            raise CheckpointError(f"{file}: missing tensor {name!r}, though target_modules names it")
    # 3. By our layers: of several that are one here, each changes its own rows.
    layers: dict[str, tuple[Factors, ...]] = {}
    for module, pair in pairs.items():
        target = targets[module]
        factors = Factors(pair["A"], pair["B"], target.rows)
        if not (settings.scale * factors.B).isfinite().all():
            name = file.parent / "adapter_config.json"
            raise CheckpointError(
                f"{name}: lora_alpha={settings.lora_alpha:g}: {module!r} times it has numbers beyond fp32"
            )
        layers[target.layer] = (*layers.get(target.layer, ()), factors)
    if not layers:
        raise CheckpointError(f"{file}: target_modules={settings.target_modules!r} names no linear layer")
    return layers
