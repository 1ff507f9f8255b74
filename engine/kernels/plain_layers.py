"""What the tuned kernels ask of a model's layers. Part 13."""

from typing import cast

from torch import nn

from engine.layers.replace import linear_names
from engine.models.gpt2 import Block
from engine.models.gpt2 import Model as GPT2

NAME_DOTS = 3  # of a block's layer, as in "blocks.0.mlp.down"; a layer inside a wrapper has more


def has_plain_linears(model: nn.Module, num_layers: int) -> bool:
    """Whether all linear layers (four in each block, and the head) are nn.Linear: not quantized, wrapped or
    packed. `num_layers`: the number of blocks.
    """
    names = linear_names(model)
    linears = [model.get_submodule(name) for name in names]
    is_wrapped = any(name.count(".") > NAME_DOTS for name in names)
    is_plain = not is_wrapped and all(isinstance(linear, nn.Linear) for linear in linears)
    return is_plain and len(linears) == 4 * num_layers + 1


def gpt2_blocks(model: GPT2) -> list[Block]:
    """The model's blocks with their type, which nn.ModuleList does not declare."""
    return cast(list[Block], list(model.blocks))
