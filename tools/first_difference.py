"""Where our model's numbers first differ from Hugging Face's: the layer, and the part of it.

Both models compute the same tokens, and what each part of each layer gives is compared in the order in which
the parts are computed: the embedding, then of each layer the norms, attention and the MLP, then the hidden
states behind all layers, then the logits. A wrong part makes all later ones wrong, so the first is the one to
look at.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.interface import Attend
from engine.models.language_model import LanguageModel

TOLERANCE = 1e-4  # of fp32, for numbers up to 1; larger numbers may differ by as much more
# In the order of computation: the name of a part, and what it gives[T, ...].
Outputs = list[tuple[str, Tensor]]


def first_difference(
    ours: LanguageModel,
    theirs: PreTrainedModel,
    token_ids: Tensor,
    attend: Attend,
    tolerance: float = TOLERANCE,
) -> str | None:
    """A line with the first part that differs by more than `tolerance`, and by how much; None if none does.

    token_ids[T]. Parts have our names. Raises ValueError if the layers of both have other numbers of parts.
    """
    positions = torch.arange(len(token_ids), device=token_ids.device)

    def compute_ours() -> Outputs:
        hidden = ours(token_ids, positions, attend)
        return [("the norm behind all layers", hidden), ("the output layer", ours.logits(hidden))]

    def compute_theirs() -> Outputs:
        found = theirs(token_ids[None], output_hidden_states=True)
        return [("hidden", found.hidden_states[-1]), ("logits", found.logits)]

    mine = _outputs(list(_layers_of(ours)), compute_ours)
    want = _outputs(list(_layers_of(theirs)), compute_theirs)
    if len(mine) != len(want):
        raise ValueError(f"our layers have {len(mine)} parts in all, and Hugging Face's {len(want)}")
    for (name, got), (_, expected) in zip(mine, want, strict=True):
        difference, largest = float((got - expected).abs().max()), float(expected.abs().max())
        if not difference <= tolerance * max(1.0, largest):  # a NaN is a difference, too
            return (
                f"{name} by {difference:.2g}, where {tolerance * max(1.0, largest):.2g} is allowed "
                f"(Hugging Face's numbers reach {largest:.3g})"
            )
    return None


def _layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers: the longest list of modules."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


@torch.inference_mode()
def _outputs(layers: list[nn.Module], compute: Callable[[], Outputs]) -> Outputs:
    """What goes into the first layer, what each part of each layer gives, and what `compute` returns."""
    outputs: Outputs = []

    def keep(name: str, tensor: Tensor | tuple) -> None:
        tensor = tensor if isinstance(tensor, Tensor) else tensor[0]
        outputs.append((name, tensor.float().flatten(0, -2)))  # theirs has one more axis, of length 1

    hooks = [layers[0].register_forward_pre_hook(lambda _, given: keep("the embedding", given))]
    for number, layer in enumerate(layers):
        for name, part in layer.named_children():
            hook = partial(_keep_output, keep, f"layer {number}: {name}")
            hooks.append(part.register_forward_hook(hook))
    try:
        last = compute()
    finally:
        for handle in hooks:
            handle.remove()
    for name, tensor in last:
        keep(name, tensor)
    return outputs


def _keep_output(keep: Callable, name: str, part: nn.Module, given: tuple, output: Tensor | tuple) -> None:
    keep(name, output)
