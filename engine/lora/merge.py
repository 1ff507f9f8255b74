"""An adapter merged into the model's weights: a step then costs the same as without an adapter. Part 18.

Merging is for one adapter that all requests get. Merging comes first at load, since a merged weight can still
be quantized and packed. Requests with different adapters need adapters that are not merged (layer.py).
"""

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel
from engine.lora.adapter import Adapter, Factors


def difference(factors: Factors, scale: float) -> Tensor:
    """scale · B·A, [out, in]: what the adapter adds to these rows of a weight W[out, in].

    Our linear layers keep W as [out, in], also where the checkpoint keeps the transpose (GPT-2's Conv1D).
    """
    return scale * (factors.B @ factors.A)


@torch.no_grad()
def merge(model: AnyModel, adapter: Adapter) -> AnyModel:
    """Add the adapter to the weights of `model` in place, and return the model.

    Used as `load_model(transform=)`, before any step that replaces linear layers. Raises ValueError if a
    layer that the adapter changes is not an nn.Linear.
    """
    for name, parts in adapter.layers.items():
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name} is {type(linear).__name__}: merge before layers are replaced")
        for factors in parts:
            weight = linear.weight if factors.rows is None else linear.weight[factors.rows]
            # The sum is computed in fp32, so that a weight in half precision is rounded only once.
            weight.copy_(weight.float() + difference(factors, adapter.scale).to(weight.device))
    return model
