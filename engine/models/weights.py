"""How a checkpoint's tensors find their place in a model. Part 1.

Each architecture gives a map from Hugging Face's tensor names to `Place`s. One map serves checkpoints now and
LoRA adapters later (Part 18), because a place says which rows of which of our parameters a tensor fills.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint import CheckpointError


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: a `parameter`, or some rows of it; `transpose` for GPT-2's [in, out] Conv1D."""

    parameter: str
    rows: slice | None = None  # None: all
    transpose: bool = False


class Module(nn.Module):
    """An nn.Module without its detours, which cost a small model more than the arithmetic of many a layer.

    A call goes straight to `forward` unless somebody hooked in, and layers and weights are found as quickly
    as any other attribute (nn.Module looks for them where they are not, first).
    """

    def __call__(self, *args):
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args)
        return self.forward(*args)

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value
        elif value is None and name in self._parameters | self._modules:  # it was one, and is taken away
            self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def _apply(self, *args, **options):
        """What `to`, `half` and their kin do: on another device, parameters are new objects."""
        super()._apply(*args, **options)
        self.__dict__.update({name: value for name, value in self._parameters.items() if value is not None})
        return self

    def reset_parameters(self) -> None:
        """Draws no random numbers when it is made: all of them come from the checkpoint."""


class Linear(Module, nn.Linear): ...


class Embedding(Module, nn.Embedding):
    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.embedding(self.weight, token_ids)  # [T] -> [T, D]


class LayerNorm(Module, nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # [T, D]


class Filler:
    """Copies tensors into their places in a model and knows what is still empty.

    Raises CheckpointError naming file, tensor and shapes, for a tensor that does not fit, has no place, or is
    missing.
    """

    def __init__(self, model: nn.Module, places: dict[str, Place]) -> None:
        self.parameters = dict(model.named_parameters())
        self.places = places
        self.empty = set(places)

    @torch.no_grad()
    def fill(self, file: str, name: str, tensor: Tensor) -> None:
        if name not in self.places:
            raise CheckpointError(f"{file}: tensor {name!r} has no place in this model")
        place = self.places[name]
        target = self.parameters[place.parameter]
        target = target if place.rows is None else target[place.rows]
        shape = tuple(target.T.shape if place.transpose else target.shape)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{file}: tensor {name!r} is {tensor.dtype}, the model needs floating point"
            )
        target.copy_(tensor.T if place.transpose else tensor)  # converts dtype and device on the way
        self.empty.discard(name)

    def finish(self, folder: str) -> None:
        if self.empty:
            names = sorted(self.empty)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"{folder}: missing tensor {', '.join(map(repr, names[:3]))}{more}")
