"""Swaps a model's linear layers for other ones that compute the same. Part 3.

Packed weights (here), quantization (Part 17) and LoRA (Part 18) all change how y = x·Wᵀ + b is computed and
leave the rest of the model alone, so they share this one function.

A linear layer is a module that has `in_features` and `out_features`: nn.Linear, and quantized layers too.

The order at load is: merge, quantize, wrap, pack. A merged adapter changes the weights that are quantized.
Wrapping finds quantized layers and plain ones alike. Packing is last: it finds the layer inside a wrapper,
which stays, and leaves quantized layers alone. (A packed layer is no linear layer any more.)
"""

from collections.abc import Callable

from torch import nn


def linear_names(model: nn.Module) -> list[str]:
    """The dotted names of the model's linear layers, in the order of the model."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    ]


def replace_linears(model: nn.Module, make: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Put `make(name, linear)` in the place of every linear layer of `model`, in place; returns the model.

    `name` is dotted, and every model's output layer is "head". `make` may give `linear` itself back. A head
    tied to the embedding is replaced too; the embedding keeps the shared weight.
    """
    for name in linear_names(model):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(name, model.get_submodule(name)))
    return model
