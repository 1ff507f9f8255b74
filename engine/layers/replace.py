"""Replaces the linear layers of a model by other layers. Part 3.

Packed weights (Part 3), quantization (Part 17) and LoRA (Part 18) all change how y = x·Wᵀ + b is computed and
leave the rest of the model alone, so they share `replace_linears`. A linear layer is any module that
satisfies `LinearLayer`: an nn.Linear or a quantized layer. A packed layer does not satisfy `LinearLayer`.

At load, layers change in this order:

1. Merge adapters, because merging changes the weights that are quantized.
2. Quantize.
3. Wrap for adapters. A wrapper holds a plain or a quantized layer.
4. Pack. Packing replaces plain layers, also inside a wrapper, and leaves quantized layers as they are.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@runtime_checkable
class LinearLayer(Protocol):
    """A layer that computes y[T, out_features] = layer(x[T, in_features])."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """x[T, in_features] -> [T, out_features]"""


def linear_names(model: nn.Module) -> list[str]:
    """The dotted names of the model's linear layers, in the order of `named_modules`."""
    return [name for name, module in model.named_modules() if isinstance(module, LinearLayer)]


def replace_linears(model: AnyModel, make: Callable[[str, nn.Module], nn.Module]) -> AnyModel:
    """Replace every linear layer of `model` by `make(name, linear)`, in place, and return the model.

    `name` is the layer's dotted name; the output layer of every model is "head". If `make` returns `linear`
    itself, the layer stays, and `make` is called for the linear layers inside it, too (a wrapper holds one).
    A head that is tied to the embedding is replaced, too, and the embedding keeps the shared weight.
    """
    replaced: list[str] = []
    for name in linear_names(model):
        if name.startswith(tuple(f"{outer}." for outer in replaced)):
            continue  # this layer was inside a layer that is replaced, so it is no longer in the model
        linear = model.get_submodule(name)
        new = make(name, linear)
        if new is not linear:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new)
            replaced.append(name)
    return model
