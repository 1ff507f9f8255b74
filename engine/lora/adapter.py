"""A LoRA adapter in memory: two thin matrices for each linear layer that the adapter changes. Part 18.

LoRA leaves a layer's weight W[out, in] as it is and learns a difference of low rank: the layer computes with
W + scale · B·A, where A is [r, in] and B is [out, r]. This module reads PEFT's format: adapter_config.json
and adapter_model.safetensors. A pickle file is never opened.

Promises of an adapter that was read: every tensor in the file belongs to a linear layer of the model, no
tensor is missing, and all numbers are finite, in fp32 and in the model's dtype. Otherwise reading raises a
`CheckpointError`. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.

In names, a `module` is Hugging Face's name of a linear layer without the prefix of the model family
("h.0.mlp.c_fc"). A `path` is the layer's name in an adapter's files, which may have that prefix
("transformer.h.0.mlp.c_fc").
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.lora.config import EXPRESSION_SECONDS, AdapterConfig, read_config
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig, architecture

WRAPPED = "base_model.model."  # PEFT puts this prefix before every name of the wrapped model
TENSOR_NAME = re.compile(re.escape(WRAPPED) + r"(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True)
class Factors:
    """The difference that an adapter makes to some output rows of a linear layer."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    rows: slice | None = None  # rows of our layer's weight, such as q's in a fused qkv layer; None: all rows


@dataclass(frozen=True)
class Adapter:
    """An adapter's factors for every layer that the adapter changes. `scale` multiplies every product B·A."""

    rank: int
    scale: float
    layers: dict[str, tuple[Factors, ...]]  # by the dotted name of our linear layer
    folder: str = ""  # the absolute path of the adapter's folder


@dataclass(frozen=True)
class Target:
    """Where a linear layer of Hugging Face's model lies in ours: some or all rows of one of our layers."""

    layer: str  # the dotted name of our linear layer
    rows: slice | None  # rows of our layer's weight; None: all rows
    shape: tuple[int, int]  # (out, in) of Hugging Face's layer


@lru_cache(maxsize=8)  # every load of an adapter calls this function with the same model's config
def targets_of(config: ModelConfig) -> dict[str, Target]:
    """The linear layers that an adapter may change, by Hugging Face's name.

    The output layer is left out. The record of rows (rows.py) counts all rows of a step, and the output layer
    computes only the rows that need logits.
    """
    family = architecture(config.model_type, config.model_impl)
    model = family.Model(config, device="meta")
    targets = {}
    for name, place in family.places(config).items():
        layer, _, leaf = place.parameter.rpartition(".")
        if leaf == "weight" and layer != "head" and isinstance(model.get_submodule(layer), nn.Linear):
            weight = model.get_parameter(place.parameter)
            if place.rows is not None:
                weight = weight[place.rows]
            targets[name.removesuffix(".weight")] = Target(layer, place.rows, tuple(weight.shape))
    return targets


def read_adapter(
    folder: str | Path,
    config: ModelConfig,
    max_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """Read the adapter in `folder`, for a model with this config. Its factors are in fp32 on the CPU.

    `max_rank`: the largest rank that is accepted; None: any rank. `dtype`: the dtype of the model's slots,
    which the adapter's numbers must fit.

    Raises CheckpointError if a file is missing or damaged, if a setting is not supported or names no linear
    layer, if the rank is above `max_rank`, if a tensor is missing, has no place in the model or the wrong
    shape, or if a number is not finite or too large for `dtype`.
    """
    folder = Path(os.path.expanduser(folder))
    settings = read_config(folder)
    if max_rank is not None and settings.r > max_rank:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: r={settings.r}: at most max_lora_rank={max_rank} is accepted"
        )
    file = _weights_file(folder)
    targets = targets_of(config)
    prefix = architecture(config.model_type, config.model_impl).PREFIX
    adapted = _adapted_paths(file, settings, targets, prefix)
    try:
        with safe_open(file, framework="pt") as tensors:
            pairs = _read_pairs(file, tensors, settings, targets, prefix, adapted)
            has_prefix = any(name.startswith(WRAPPED + prefix) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None
    _refuse_missing(file, pairs, targets, prefix if has_prefix else "", adapted)
    if not pairs:
        raise CheckpointError(f"{file}: target_modules={settings.target_modules!r} names no linear layer")
    # By our layer's name. Several of Hugging Face's layers may be one layer of ours.
    parts: defaultdict[str, list[Factors]] = defaultdict(list)
    for module, pair in pairs.items():
        target = targets[module]
        factors = Factors(pair["A"], pair["B"], target.rows)
        _refuse_too_large(file, module, factors, settings, dtype)
        parts[target.layer].append(factors)
    layers = {layer: tuple(layer_parts) for layer, layer_parts in parts.items()}
    return Adapter(settings.r, settings.scale, layers, str(folder.resolve()))


def _weights_file(folder: Path) -> Path:
    """The adapter's safetensors file. Raises CheckpointError if it is missing, or not a regular file."""
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        return file
    has_pickle = (folder / "adapter_model.bin").exists()
    hint = "; adapter_model.bin may hold code: save it as safetensors" if has_pickle else ""
    why = "not a regular file" if file.exists() else "no such file"  # a pipe may never answer
    raise CheckpointError(f"{file}: {why}{hint}")


def _adapted_paths(file: Path, settings: AdapterConfig, modules: Collection[str], prefix: str) -> set[str]:
    """The paths that the setting `target_modules` names, among the names of all modules with and without
    `prefix`, the model family's. Raises CheckpointError if matching takes longer than EXPRESSION_SECONDS.
    """
    try:
        return settings.select(set(modules) | {prefix + module for module in modules})
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
    """Read the file's tensors as {module: {"A": Tensor, "B": Tensor}}, in fp32. `prefix`: of the model
    family. `adapted`: the paths that the settings name.

    Raises CheckpointError if a tensor belongs to no adapted layer, if its shape is not the model's, or if a
    number is not a finite floating-point number.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for name in tensors.keys():  # noqa: SIM118  # safe_open is not a dict
        match = TENSOR_NAME.fullmatch(name)
        if match is None or match["path"] not in adapted:
            raise CheckpointError(f"{file}: tensor {name!r} belongs to no linear layer that is adapted here")
        module, factor = match["path"].removeprefix(prefix), match["factor"]
        out_features, in_features = targets[module].shape
        needed = (settings.r, in_features) if factor == "A" else (out_features, settings.r)
        shape = tuple(tensors.get_slice(name).get_shape())  # get_slice does not read the tensor's numbers
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
    """Raise CheckpointError if a layer that the settings name lacks its tensor A or B. `file_prefix`: the
    prefix of paths in this file, or "". `adapted`: the paths that the settings name.
    """
    for module in targets:
        missing = {"A", "B"} - pairs.get(module, {}).keys()
        if missing and file_prefix + module in adapted:
            name = f"{WRAPPED}{file_prefix}{module}.lora_{min(missing)}.weight"
            raise CheckpointError(f"{file}: missing tensor {name!r}, though target_modules names it")


def _refuse_too_large(
    file: Path, module: str, factors: Factors, settings: AdapterConfig, dtype: torch.dtype
) -> None:
    """Raise CheckpointError if A or scale · B has a number that is too large for `dtype`."""
    limit = f"at most {torch.finfo(dtype).max:g} fits {str(dtype).removeprefix('torch.')}"
    if not factors.A.to(dtype).isfinite().all():
        largest = factors.A.abs().max().item()
        raise CheckpointError(f"{file}: lora_A of {module!r} has numbers up to {largest:g}: {limit}")
    if not (settings.scale * factors.B).to(dtype).isfinite().all():  # the product of LoRALinear.write
        largest = abs(settings.scale) * factors.B.abs().max().item()
        config = file.parent / "adapter_config.json"
        raise CheckpointError(
            f"{config}: lora_alpha={settings.lora_alpha:g}: lora_B of {module!r} times "
            f"scale={settings.scale:g} has numbers up to {largest:g}: {limit}"
        )
