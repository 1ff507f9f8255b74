"""An adapter in memory: for each linear layer it changes, two thin matrices. Part 18.

LoRA leaves a layer's weight W[out, in] as it is and learns a difference of low rank: W + scale · B·A with
A[r, in] and B[out, r]. Reads PEFT's format: adapter_config.json and adapter_model.safetensors. Promises that
every tensor in the file belongs to a layer, that none is missing, and that all numbers are finite, also in
the model's dtype; or a `CheckpointError` in words. Never unpickles. Source: Hu et al. 2021,
https://arxiv.org/abs/2106.09685.
"""

import os
import re
from collections.abc import Iterable
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
    rows: slice | None = None  # of the layer's weight, None: all. Where q, k and v are one layer: q's, say


@dataclass(frozen=True)
class Adapter:
    """An adapter's factors for every layer that it changes. `scale` multiplies each difference B·A."""

    rank: int
    scale: float
    layers: dict[str, tuple[Factors, ...]]  # by the dotted name of our linear layer
    folder: str = ""  # where it was read


@dataclass(frozen=True)
class Target:
    """Which part of which of our linear layers a linear layer of Hugging Face's is."""

    layer: str  # our linear layer's dotted name
    rows: slice | None  # of our layer's weight; None: all
    shape: tuple[int, int]  # out, in


@lru_cache(maxsize=8)  # every load asks, and for the same model
def targets_of(config: ModelConfig) -> dict[str, Target]:
    """Every linear layer that an adapter may change, by Hugging Face's name: all but the output layer, whose
    rows are not the step's rows (it computes those alone that need logits).
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


def read_adapter(
    folder: str | Path,
    config: ModelConfig,
    max_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """The adapter in `folder`, for a model of this shape, in fp32 on the CPU. `dtype`: what its numbers must
    fit, since the model's slots have it.

    Raises CheckpointError: a file is missing, damaged, or asks for what is not computed here; a rank above
    `max_rank`; a tensor that belongs nowhere in this model, the wrong shape, or numbers that are not finite
    or too large for `dtype`.
    """
    folder = Path(os.path.expanduser(folder))
    settings = read_config(folder)
    if max_rank is not None and settings.r > max_rank:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: r={settings.r}: at most max_lora_rank={max_rank} is accepted"
        )
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        has_pickle = (folder / "adapter_model.bin").exists()
        hint = "; adapter_model.bin may hold code: save it as safetensors" if has_pickle else ""
        raise CheckpointError(f"{file}: no such file{hint}")
    targets, prefix = targets_of(config), architecture(config.model_type).PREFIX
    paths = [lead + name for name in targets for lead in ("", prefix)]  # a file's names may have the prefix
    adapted = _adapted_modules(file, settings, paths)
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            pairs = _read_pairs(file, tensors, settings, targets, prefix, adapted)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None
    file_prefix = prefix if any(name.startswith(WRAPPED + prefix) for name in names) else ""
    _refuse_missing(file, pairs, targets, file_prefix, adapted)
    # By our layers: where several of Hugging Face's are one of ours, each changes its rows of it.
    layers: dict[str, tuple[Factors, ...]] = {}
    for module, pair in pairs.items():
        target = targets[module]
        factors = Factors(pair["A"], pair["B"], target.rows)
        _refuse_too_large(file, module, factors, settings, dtype)
        layers[target.layer] = (*layers.get(target.layer, ()), factors)
    if not layers:
        raise CheckpointError(f"{file}: target_modules={settings.target_modules!r} names no linear layer")
    return Adapter(settings.r, settings.scale, layers, str(folder.resolve()))


def _adapted_modules(file: Path, settings: AdapterConfig, modules: Iterable[str]) -> set[str]:
    """Those of these modules that `target_modules` names. Raises CheckpointError: it takes too long."""
    try:
        return settings.targets(set(modules))
    except TimeoutError:
        raise CheckpointError(
            f"{file.parent / 'adapter_config.json'}: target_modules={settings.target_modules!r:.80}: an "
            f"expression that takes at most {EXPRESSION_SECONDS:g} seconds for all names is accepted"
        ) from None


def _read_pairs(
    file: Path,
    tensors: safe_open,
    settings: AdapterConfig,
    targets: dict[str, Target],
    prefix: str,
    adapted: set[str],
) -> dict[str, dict[str, Tensor]]:
    """{module: {"A": Tensor, "B": Tensor}} in fp32, with Hugging Face's names of modules. Raises
    CheckpointError: a tensor belongs to no adapted layer, or has not the shape or the numbers it needs.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for name in tensors.keys():  # noqa: SIM118  # safe_open is no dict
        match = FACTOR.fullmatch(name.removeprefix(WRAPPED))
        path, factor = match.groups() if match else ("", "")
        module = path.removeprefix(prefix)
        if not name.startswith(WRAPPED) or module not in targets or path not in adapted:
            raise CheckpointError(f"{file}: tensor {name!r} belongs to no linear layer that is adapted here")
        out_features, in_features = targets[module].shape
        needed = (settings.r, in_features) if factor == "A" else (out_features, settings.r)
        shape = tuple(tensors.get_slice(name).get_shape())  # this reads no numbers yet
        if shape != needed:
            raise CheckpointError(f"{file}: tensor {name!r} has shape {shape}, the model needs {needed}")
        tensor = tensors.get_tensor(name)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(
                f"{file}: tensor {name!r} ({tensor.dtype}): finite floating point is accepted"
            )
        pairs.setdefault(module, {})[factor] = tensor.to(torch.float32)
    return pairs


def _refuse_missing(
    file: Path,
    pairs: dict[str, dict[str, Tensor]],
    targets: dict[str, Target],
    file_prefix: str,
    adapted: set[str],
) -> None:
    """Raises CheckpointError: a layer that the settings name has no tensors, or A without B. `file_prefix`:
    what this file's names have before the module's.
    """
    for module in targets:
        missing = {"A", "B"} - pairs.get(module, {}).keys()
        if missing and file_prefix + module in adapted:
            name = f"{WRAPPED}{file_prefix}{module}.lora_{min(missing)}.weight"
            raise CheckpointError(f"{file}: missing tensor {name!r}, though target_modules names it")


def _refuse_too_large(
    file: Path, module: str, factors: Factors, settings: AdapterConfig, dtype: torch.dtype
) -> None:
    """Raises CheckpointError: A, or scale · B, has numbers that are infinite in `dtype`."""
    limit = f"at most {torch.finfo(dtype).max:g} fits {str(dtype).removeprefix('torch.')}"
    if not factors.A.to(dtype).isfinite().all():
        largest = factors.A.abs().max().item()
        raise CheckpointError(f"{file}: lora_A of {module!r} has numbers up to {largest:g}: {limit}")
    if not (settings.scale * factors.B).to(dtype).isfinite().all():  # as LoRALinear.write computes it
        largest = abs(settings.scale) * factors.B.abs().max().item()
        config = file.parent / "adapter_config.json"
        raise CheckpointError(
            f"{config}: lora_alpha={settings.lora_alpha:g}: lora_B of {module!r} times "
            f"scale={settings.scale:g} has numbers up to {largest:g}: {limit}"
        )
