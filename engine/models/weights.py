"""Layers of models, and how a checkpoint's tensors are copied into a model's parameters. Part 1.

Each architecture has a map from Hugging Face's tensor names to `Place`s. A place says which rows of which
parameter a tensor fills, so the same map serves checkpoints and LoRA adapters (Part 18).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.checkpoint import CheckpointError


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint goes: a parameter of our model, or some rows of the parameter."""

    parameter: str  # the parameter's dotted name in our model
    rows: slice | None = None  # None means all rows
    transpose: bool = False  # for GPT-2's Conv1D, whose weights are [in, out]; those of Linear are [out, in]
    matrices: int = 1  # matrices of one size that the tensor holds side by side (GPT-2's c_attn: q, k and v)


class Module(nn.Module):
    """An nn.Module with faster calls and attributes. In a small model, nn.Module's overhead costs more than
    the arithmetic of many layers.

    - A call goes straight to `forward` unless this module has a forward hook or an argument is given by name.
      Other hooks, those of backward passes and those for all modules, are not called then.
    - Layers and weights are in `__dict__`, too, where Python finds an attribute at once. nn.Module keeps them
      in other dictionaries, which `__getattr__` searches only after `__dict__`.

    `__setattr__`, `__delattr__` and `_apply` keep `__dict__` up to date. `add_module` and
    `register_parameter` do not: to replace a layer or a weight, set the attribute.
    """

    def __call__(self, *args, **options):
        if options or self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **options)
        return self.forward(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value
        elif value is None and name in self._parameters | self._modules:  # None removes a layer or weight
            self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def _apply(self, *args, **options):
        """The step that `to`, `half` and similar methods share. It may replace parameters by new objects, for
        example on the device "meta".
        """
        super()._apply(*args, **options)
        self.__dict__.update({name: value for name, value in self._parameters.items() if value is not None})
        return self

    def reset_parameters(self) -> None:
        """Do nothing. nn.Linear and other layers would draw random weights, which the checkpoint replaces."""


class Linear(Module, nn.Linear):
    """x[T, in] -> [T, out]: x·weightᵀ + bias, with weight[out, in] and bias[out]."""


class Embedding(Module, nn.Embedding):
    """token_ids[T] -> [T, D]: the row of weight[V, D] for each id."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.embedding(self.weight, token_ids)  # [T] -> [T, D]


class LayerNorm(Module, nn.LayerNorm):
    """x[T, D] -> [T, D]: (x - mean) / standard deviation of each row, times weight[D], plus bias[D]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # [T, D]


def refuse_not_finite(file: str, name: str, tensor: Tensor) -> None:
    """Raises CheckpointError, which names the file and the tensor, if a number of the tensor is not finite.

    The sum is checked first, because summing is the fastest way to read a tensor, and a number that is not
    finite makes the sum not finite. The sum of large finite numbers may overflow, too. So each number is
    checked if the sum is not finite.
    """
    if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
        raise CheckpointError(f"{file}: tensor {name!r} holds numbers that are not finite, as {tensor.dtype}")


def refuse_missing(folder: str, missing: Collection[str]) -> None:
    """Raises CheckpointError, which names `folder` and up to three tensors, if there are missing tensors."""
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"{folder}: missing tensor {', '.join(map(repr, names[:3]))}{more}")


class Filler:
    """Copies tensors into their places in a model, and notes which places are still empty."""

    def __init__(self, model: nn.Module, places: dict[str, Place]) -> None:
        """`places` has the place of each tensor that the checkpoint must have, by the tensor's name."""
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.places = places
        self.empty = set(places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the tensor `name`, which has a place, needs."""
        place = self.places[name]
        rows = self._rows(place)
        return tuple(rows.T.shape if place.transpose else rows.shape)

    def _rows(self, place: Place) -> Tensor:
        """The rows of a parameter that belong to this place: a view."""
        parameter = self.parameters[place.parameter]
        return parameter if place.rows is None else parameter[place.rows]

    def claim(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """Note a tensor's place as filled, and return it: a parameter, or rows of one. The numbers of the
        tensor, from `file`, are not read.

        Raises CheckpointError, which names the file and the tensor, if the tensor has no place in the model,
        has another shape than its place, or is not of a floating point dtype.
        """
        if name not in self.places:
            raise CheckpointError(f"{file}: tensor {name!r} has no place in this model")
        shape, needed = tuple(tensor.shape), self.shape(name)
        if shape != needed:
            raise CheckpointError(f"{file}: tensor {name!r} has shape {shape}, the model needs {needed}")
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{file}: tensor {name!r} is {tensor.dtype}, the model needs floating point"
            )
        self.empty.discard(name)
        return self._rows(self.places[name])

    @torch.no_grad()
    def fill(self, file: str, name: str, tensor: Tensor) -> None:
        """Copy one tensor of `file` into its place, in the dtype and on the device of the model.

        Raises CheckpointError as `claim` does, and if a number is not finite in the model's dtype.
        """
        target = self.claim(file, name, tensor)
        if self.places[name].transpose:
            tensor = tensor.T
        target.copy_(tensor)  # also converts the dtype, and moves the numbers to the device
        refuse_not_finite(file, name, target)

    def finish(self, folder: str) -> None:
        """Raises CheckpointError, as `refuse_missing` does, if a place is still empty."""
        refuse_missing(folder, self.empty)
