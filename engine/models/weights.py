"""How a checkpoint's tensors find their place in a model. Part 1.

Each architecture gives a map from Hugging Face's tensor names to `Place`s. One map serves checkpoints now and
LoRA adapters later (Part 18), because a place says which rows of which of our parameters a tensor fills.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.checkpoint import CheckpointError


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: into a parameter, or into some rows of it."""

    parameter: str  # its dotted name in our model
    rows: slice | None = None  # None: all
    transpose: bool = False  # GPT-2's Conv1D has [in, out], our Linear [out, in]


class Module(nn.Module):
    """An nn.Module whose calls and attributes are faster: in a small model nn.Module's own cost more than the
    arithmetic of many layers.

    A call goes straight to `forward`, unless a hook is registered. Layers and weights are plain attributes.
    nn.Module keeps them in dictionaries of its own, where `__getattr__` finds them only after the plain
    look-up has failed, ten times as slowly: a step of the storyteller has 131 such look-ups, a tenth of its
    time on a CPU. So what nn.Module registers is in `__dict__`, too; the three methods below `__call__` keep
    the two equal.
    """

    def __call__(self, *args, **options):
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **options)
        return self.forward(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value
        elif value is None and name in self._parameters | self._modules:  # a layer or weight is removed
            self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def _apply(self, *args, **options):
        """What `to`, `half` and their kin do: on some devices ("meta"), parameters are new objects then."""
        super()._apply(*args, **options)
        self.__dict__.update({name: value for name, value in self._parameters.items() if value is not None})
        return self

    def reset_parameters(self) -> None:
        """Nothing: nn.Linear and others would draw random weights here, and the checkpoint has them all."""


class Linear(Module, nn.Linear):
    """x[T, in] -> [T, out]"""


class Embedding(Module, nn.Embedding):
    """token_ids[T] -> [T, D], their rows of weight[V, D]."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.embedding(self.weight, token_ids)  # [T] -> [T, D]


class LayerNorm(Module, nn.LayerNorm):
    """(x[T, D] - mean) / standard deviation, both of each row; times weight[D], plus bias[D]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # [T, D]


def refuse_not_finite(file: str, name: str, tensor: Tensor) -> None:
    """Raises CheckpointError naming file and tensor: one of its numbers is nan or infinite.

    The sum comes first, since it is the fastest way to read a tensor: if one number is not finite, the sum is
    not. The sum of large numbers may overflow, too; so if it is not finite, each number is looked at.
    """
    if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
        raise CheckpointError(f"{file}: tensor {name!r} holds numbers that are not finite, as {tensor.dtype}")


class Filler:
    """Copies tensors into their places in a model, and tracks which places are still empty."""

    def __init__(self, model: nn.Module, places: dict[str, Place]) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.places = places
        self.empty = set(places)

    def target(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """The parameter, or the rows of it, that a tensor of `file` goes into. The place counts as filled
        from now on.

        Raises CheckpointError naming file, tensor and shapes: it has no place, another shape, or no floats.
        """
        if name not in self.places:
            raise CheckpointError(f"{file}: tensor {name!r} has no place in this model")
        place = self.places[name]
        target = self.parameters[place.parameter]
        target = target if place.rows is None else target[place.rows]
        shape, needed = tuple(tensor.shape), tuple(target.T.shape if place.transpose else target.shape)
        if shape != needed:
            raise CheckpointError(f"{file}: tensor {name!r} has shape {shape}, the model needs {needed}")
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{file}: tensor {name!r} is {tensor.dtype}, the model needs floating point"
            )
        self.empty.discard(name)
        return target

    @torch.no_grad()
    def fill(self, file: str, name: str, tensor: Tensor) -> None:
        """Copy one tensor of `file` into its place, in the dtype and on the device of the model.

        Raises CheckpointError: as `target`, and for numbers that are not finite (in the model's dtype).
        """
        target = self.target(file, name, tensor)
        tensor = tensor.T if self.places[name].transpose else tensor
        target.copy_(tensor)  # converts dtype and device on the way
        refuse_not_finite(file, name, target)

    def finish(self, folder: str) -> None:
        """Raises CheckpointError naming the folder and up to three tensors that the files do not have."""
        if self.empty:
            names = sorted(self.empty)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"{folder}: missing tensor {', '.join(map(repr, names[:3]))}{more}")
