"""The layers in which a rank's part of a model differs: sums over the ranks, no output layer. Extension A.

A layer that is cut by its inputs (shards.py) gives one term of each result on every rank, so the results are
summed. Only rank 0 chooses tokens, so only rank 0 has an output layer.
"""

from torch import Tensor, nn

from engine.layers.replace import replace_linears
from engine.models.language_model import LanguageModel
from engine.models.weights import Module
from engine.parallel.group import Group
from engine.parallel.shards import CUT_BY_INPUTS


class SumOverRanks(Module):
    """A linear layer that is cut by its inputs, and the sum of its results over the ranks.

    This module is no `LinearLayer` (engine/layers/replace.py) itself. So `pack_linears` finds and packs the
    layer inside.
    """

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in / N] -> [T, out], the same on every rank."""
        return self.group.all_reduce_sum(self.inner(x))


class NoLogits(Module):
    """Stands in place of the output layer on ranks that choose no token, to save its memory and time."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, 0]"""
        return hidden[:, :0]


def sum_over_ranks(model: LanguageModel, group: Group) -> LanguageModel:
    """Add the sums to a rank's part of a model, in place, and return the model. Only rank 0 keeps the output
    layer. Call this after `quantize` and after the adapters' slots are made, and before `pack_linears`.
    """

    def make(name: str, linear: nn.Module) -> nn.Module:
        return SumOverRanks(linear, group) if name.endswith(CUT_BY_INPUTS) else linear

    replace_linears(model, make)
    if group.rank:
        model.head, model.has_head = NoLogits(), False
    return model


def row_max(group: Group, name: str, weight: Tensor) -> Tensor | None:
    """[out]: the largest magnitude in each row of a layer's weight[out, in / N], over all ranks. None if the
    layer is not cut by its inputs, since its rows are whole. For `quantize(row_max=)`: all ranks then scale
    their codes of a row by the whole row's maximum.
    """
    if not name.endswith(CUT_BY_INPUTS):
        return None
    return group.all_reduce_max(weight.abs().amax(1))
