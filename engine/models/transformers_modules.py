"""Modules that our engine puts into a model of transformers, in the places of its own. Extension C."""

from typing import Any

from torch import Tensor, nn

from engine.models.language_model import LanguageModel
from engine.models.weights import Module


def replace_module(outer: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` in place of `old`, a module somewhere inside `outer`. Raises ValueError if it is not."""
    outer.set_submodule(name_in(outer, old), new)


def name_in(outer: nn.Module, inner: nn.Module) -> str:
    """The dotted name of `inner`, a module somewhere inside `outer`. Raises ValueError if it is not."""
    for name, module in outer.named_modules():
        if module is inner:
            return name
    raise ValueError(f"{type(outer).__name__} has no such {type(inner).__name__} inside")


class DecoderOutput(tuple):
    """A decoder's result in the library's form: the hidden states, and None for every other attribute, since
    the library's models copy different ones (`past_key_values`, `attentions`) into their own results.
    """

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class PassThrough(nn.Module):
    """Stands in place of the decoder in the library's model: returns hidden states as they are given."""

    def forward(self, *inputs: Any, inputs_embeds: Tensor, **options: Any) -> DecoderOutput:
        """inputs_embeds[1, R, D]: hidden states -> the same. Other arguments have no effect."""
        return DecoderOutput((inputs_embeds,))


class CurrentHead(nn.Module):
    """Stands in place of the output layer in the library's model: calls the `head` that `model` has now,
    which may be a packed or quantized one.
    """

    model: LanguageModel

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        # In `__dict__`, so that the model does not become a module of this one: it would contain itself.
        self.__dict__["model"] = model

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden[1, R, D] -> [1, R, V]"""
        return self.model.head(hidden[0])[None]


class FlatLinear(Module):
    """Calls a linear layer with all rows on one axis: x[..., in] -> [..., out]. Layers that replace linear
    layers (packed, quantized, with adapters) take only x[T, in].
    """

    def __init__(self, linear: nn.Linear, name: str) -> None:
        """`name`: the layer's name inside this module, by which several ranks know how to cut the layer
        (`linear_name` of transformers_ranks.py).
        """
        super().__init__()
        self.name = name
        self.add_module(name, linear)

    @property
    def weight(self) -> Tensor:
        """The layer's weight, whose dtype or device some code of the library reads."""
        return self._linear.weight  # type: ignore[return-value]  # any linear layer has one

    @property
    def _linear(self) -> nn.Module:
        """The layer, or the one that has replaced it."""
        return getattr(self, self.name)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., in] -> [..., out]"""
        return self._linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
