"""An adapter merged into the weights: afterwards a step computes no more than without it. Part 18.

For one adapter that all requests get. Merging comes first at load: a merged weight can still be quantized and
packed. Requests for different adapters need them unmerged (layer.py).
"""

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel
from engine.lora.adapter import Adapter, Factors


def difference(factors: Factors, scale: float) -> Tensor:
    """scale · B·A, [out, in]: what the adapter adds to these rows of a weight W[out, in].

    Our linear layers keep W as [out, in] whatever the checkpoint does (GPT-2's Conv1D keeps its transpose).
    """
    return scale * (factors.B @ factors.A)


@torch.no_grad()
def merge(model: AnyModel, adapter: Adapter) -> AnyModel:
    """Add the adapter to the weights of `model`, in place; returns the model. For `load_model(transform=)`,
    before anything that replaces linear layers. Raises ValueError: a layer is no nn.Linear any more.
    """
    for name, parts in adapter.layers.items():
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name} is {type(linear).__name__}: merge before layers are replaced")
        for factors in parts:
            weight = linear.weight if factors.rows is None else linear.weight[factors.rows]
            # In fp32, and rounded once: the weight may be in half precision.
            weight.copy_(weight.float() + difference(factors, adapter.scale).to(weight.device))
    return model
