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


class _Unfilled(nn.Module):
    """A layer that draws no random numbers when it is made: all of them come from the checkpoint."""

    def reset_parameters(self) -> None:
        pass


class Linear(_Unfilled, nn.Linear): ...


class Embedding(_Unfilled, nn.Embedding): ...


class LayerNorm(_Unfilled, nn.LayerNorm): ...


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
