"""Swaps a model's linear layers for other ones that compute the same. Part 3.

Packed weights (here), quantization (Part 17) and LoRA (Part 18) all change how y = x·Wᵀ + b is computed and
leave the rest of the model alone, so they share this one function.
"""

from collections.abc import Callable

from torch import nn


def linear_names(model: nn.Module) -> list[str]:
    """The dotted names of the model's nn.Linear layers, in the order of the model."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Put `make(linear)` in the place of every nn.Linear of `model`, in place; returns the model.

    A head tied to the embedding is replaced too; the embedding keeps the shared weight.
    """
    for name in linear_names(model):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(model.get_submodule(name)))
    return model
