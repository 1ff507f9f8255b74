"""One rank's part of a model of transformers, cut as the library's own plan says. Extension C.

A configuration of the library may have a plan, `base_model_tp_plan`: which linear layers several ranks cut by
their outputs ("colwise"), and which by their inputs ("rowwise"), whose results are summed over the ranks.
Promises that a model whose plan says more, or that does not run with a part of its layers, is refused by
name. What a rank gets of a tensor, and the sums, are Extension A's (engine/parallel/shards.py).
"""

import re
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.models import transformers_survey
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.transformers_library import build, decoder_of, library_config
from engine.models.weights import Place

COLWISE, ROWWISE = "colwise", "rowwise"  # the library's names in its plans
WHOLE = "replicated_with_grad_allreduce"  # every rank has all of it: the entry is about gradients alone


class ShardTensor(Protocol):
    """`Sharding.shard` of loader.py, or a stand-in: one rank's part of a tensor."""

    def __call__(self, tensor: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor: ...


def plan_entries(hf_config: Any, body: nn.Module) -> dict[str, str]:
    """The plan's entry of each module and parameter of `body` that has one, by dotted name. They are in the
    plan's order, so that a refusal names the first entry that does not fit.

    The plan is that of the class of `hf_config`, the library's configuration: config.json has no say.
    """
    plan = type(hf_config).base_model_tp_plan or {}  # such as {"layers.*.mlp.up_proj": "colwise"}
    # Each name's pattern in the plan: for layers.0.mlp.up_proj it is layers.*.mlp.up_proj.
    pattern_of = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in _named(body)}
    entries: dict[str, str] = {}
    for pattern, entry in plan.items():
        for name, pattern_of_name in pattern_of.items():
            if pattern_of_name == pattern:
                entries[name] = entry
    return entries


def _named(body: nn.Module) -> dict[str, Any]:
    """The modules and the parameters of `body`, by dotted name."""
    return dict(body.named_modules()) | dict(body.named_parameters())


def linear_name(entry: str | None) -> str:
    """The name of a linear layer with this entry of the plan inside our `FlatLinear`. Extension A cuts a
    layer by its inputs if its dotted name ends in ROWWISE (CUT_BY_INPUTS of engine/parallel/shards.py).
    """
    return ROWWISE if entry == ROWWISE else "linear"


def refuse_undivided(config: ModelConfig, size: int) -> None:
    """Raises CheckpointError if `size` ranks cannot share this model: if the library has no plan for it, if
    the plan has an entry that is not supported or leaves out a linear layer, or if a part of the model does
    not run. If `size` does not divide a size in `config`, no part is tried: `divide` (engine/parallel/
    shards.py) then raises the error.
    """
    subject = f"tensor_parallel_size={size}: {config.model_type} is computed by transformers"
    hf_config = library_config(config.raw)
    causal_lm = build(hf_config, "meta", torch.bfloat16, transformers_survey.NAME)
    body = decoder_of(causal_lm)
    plan = plan_entries(hf_config, body)
    if not plan:
        raise CheckpointError(f"{subject}, which has no plan for several ranks of it (base_model_tp_plan)")
    _refuse_unknown_entries(plan, body, subject)
    if config.num_heads % size or config.num_kv_heads % size or config.intermediate_size % size:
        return  # `divide` names what is not divided
    try:
        keep_part(causal_lm, size, _empty)
        call = transformers_survey.survey(body, config.num_layers)[0]  # all layers have the same heads
    except CheckpointError as error:
        raise CheckpointError(f"{subject}, and in {size} parts it does not run: {error}") from None
    if call.num_heads != config.num_heads // size or call.num_kv_heads != config.num_kv_heads // size:
        raise CheckpointError(
            f"{subject}, and in {size} parts it does not run: it attends with {call.num_heads} and "
            f"{call.num_kv_heads} heads"
        )


def _refuse_unknown_entries(plan: dict[str, str], body: nn.Module, subject: str) -> None:
    """Raises CheckpointError, which names the module and its entry of the plan, for an entry that is none of
    COLWISE, ROWWISE (both for an nn.Linear) and WHOLE, and for an nn.Linear without an entry. The message
    begins with `subject`.
    """
    supported = f"{COLWISE!r} and {ROWWISE!r} for layers of the type Linear are supported"
    named = _named(body)
    for name, entry in plan.items():
        is_linear = type(named[name]) is nn.Linear
        if entry != WHOLE and not (is_linear and entry in (COLWISE, ROWWISE)):
            class_name = "" if is_linear else f" ({type(named[name]).__name__})"
            raise CheckpointError(
                f"{subject}, whose base_model_tp_plan has {entry!r} for {name}{class_name}; {supported}"
            )
    for name in sorted(named):
        if type(named[name]) is nn.Linear and name not in plan:
            raise CheckpointError(f"{subject}, whose base_model_tp_plan says nothing of {name}; {supported}")


def build_part(hf_config: Any, size: int, device: torch.device | str, dtype: torch.dtype) -> Any:
    """The library's model, or one of `size` ranks' parts of it, without values in its weights. Raises
    CheckpointError as `build` and `keep_part` do.
    """
    if size == 1:
        return build(hf_config, device, dtype)
    # The whole model is built on the host, since the device need not have room for it. On the host it takes
    # little memory: the system allocates a page when it is written to, and nobody writes.
    host = "meta" if torch.device(device).type == "meta" else "cpu"
    causal_lm = build(hf_config, host, dtype)
    keep_part(causal_lm, size, _empty)
    return causal_lm.to(device)


def _empty(tensor: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """The `ShardTensor` of a model without values in its weights."""
    return tensor.new_empty(shape)


@torch.no_grad()
def keep_part(causal_lm: Any, size: int, shard: ShardTensor) -> None:
    """Leave one of `size` ranks' parts of the library's model, in place: `shard` cuts the tensors of each
    layer that is cut. Raises CheckpointError if `size` does not divide a layer. The plan's entries must be
    supported, as `refuse_undivided` checks.
    """
    body = decoder_of(causal_lm)
    for name, entry in plan_entries(causal_lm.config, body).items():
        if entry not in (COLWISE, ROWWISE):
            continue
        linear = body.get_submodule(name)
        assert isinstance(linear, nn.Linear)  # only these are cut
        if entry == COLWISE:
            linear.out_features = _divided(linear.out_features, size, name)
        else:
            linear.in_features = _divided(linear.in_features, size, name)
        shapes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
        for parameter_name, tensor in list(linear.named_parameters()):
            place = Place(f"body.{name}.{linear_name(entry)}.{parameter_name}")
            tensor_part = shard(tensor.detach(), place, shapes[parameter_name])
            linear.register_parameter(parameter_name, nn.Parameter(tensor_part, requires_grad=False))


def _divided(width: int, size: int, name: str) -> int:
    """width / size. Raises CheckpointError, which names the layer, if this is no whole number."""
    if width % size:
        raise CheckpointError(f"{size} ranks cannot divide {width}, the width of {name}")
    return width // size
