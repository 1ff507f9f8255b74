"""Swaps a model's linear layers for other ones that compute the same. Part 3.

Packed weights (here), quantization (Part 17) and LoRA (Part 18) all change how y = x·Wᵀ + b is computed and
leave the rest of the model alone, so they share this one function.

A linear layer is a module with what `LinearLayer` has: nn.Linear, and quantized layers too.

The order at load is: merge, quantize, wrap, pack. A merged adapter changes the weights that are quantized.
Wrapping takes quantized layers and plain ones alike. Packing is last: it replaces the layer inside a wrapper,
and leaves quantized layers as they are. (A packed layer is no `LinearLayer`.)
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@runtime_checkable
class LinearLayer(Protocol):
    """y[T, out_features] = layer(x[T, in_features])"""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


def linear_names(model: nn.Module) -> list[str]:
    """The dotted names of the model's linear layers, in the order of the model."""
    return [name for name, module in model.named_modules() if isinstance(module, LinearLayer)]


def replace_linears(model: AnyModel, make: Callable[[str, nn.Module], nn.Module]) -> AnyModel:
    """Put `make(name, linear)` in the place of every linear layer of `model`, in place; returns the model.

    `name` is dotted, and every model's output layer is "head". `make` may return `linear` itself: then it
    stays, and `make` is called for the layers inside it (a wrapper holds one). A head tied to the embedding
    is replaced too; the embedding keeps the shared weight.
    """
    replaced: list[str] = []
    for name in linear_names(model):
        if name.startswith(tuple(f"{outer}." for outer in replaced)):
            continue
        linear = model.get_submodule(name)
        if (new := make(name, linear)) is not linear:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new)
            replaced.append(name)
    return model
