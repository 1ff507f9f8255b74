"""Our `attend` as an attention function of the library transformers. Extension C.

Hugging Face's models look up their attention by name (`AttentionInterface`). Under the name NAME they find
`attention`, which calls the `attend` of the step with q, k and v of the flat token axis. What else a layer
needs arrives as keyword arguments: a scale, a soft cap, sinks. These are passed on as extras. An argument
that this module does not know is refused, since leaving it out could change the result without an error.

No mask arrives here, since `attend` decides which token sees which. Before the weights were read,
transformers_survey.py has checked at some positions that the model's mask says the same.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.extras import PLAIN, AttentionExtras, attend_with
from engine.attention.interface import Attend

NAME = "ruvon"  # of our attention function in transformers
ANY = object()  # stands in NEUTRAL for any value
# Arguments that change nothing here, each with the values for which this is so.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "position_ids": (ANY,),  # `attend` knows the positions
    "cache_position": (ANY,),
    "use_cache": (ANY,),  # the library's cache is not used
    "past_key_values": (None,),
    "past_key_value": (None,),
    "dropout": (0.0,),
    "is_causal": (True, None),
    "sliding_window": (ANY,),  # the survey has read the window from the mask
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "output_router_logits": (False, None),
    "head_mask": (None,),
    "return_dict": (ANY,),
}


class StepContext:
    """What `attention` needs beside its arguments: the `attend` of the current step, and the layers' windows.

    The library calls `attention` without such arguments, so each layer has this object as an attribute
    (`attach`). All layers of a model share one, so that a step sets its `attend` once.
    """

    def __init__(self, windows: tuple[int | None, ...] = ()) -> None:
        self.attend: Attend | None = None  # None between two steps
        self.windows = windows  # [L]: how many tokens a layer sees; None: all


def attach(decoder: nn.Module, context: Any) -> None:
    """Give every module of `decoder` that knows its layer's number the attribute `ruvon_context`: a
    StepContext for `attention`, or the survey's list of calls for `survey_attention`.
    """
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.ruvon_context = context


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """query[1, Hq, T, Dh], key[1, Hkv, T, Dh], value[1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None). The None
    stands in place of the attention weights, which no caller asks for.

    Values that are smaller than keys (DeepSeek's) are padded with zeros, since keys and values have one size
    in our caches. Raises ValueError, which names the argument, for an argument that is not supported.
    """
    context: StepContext = module.ruvon_context
    layer = module.layer_idx
    assert context.attend is not None, "a layer attends outside of a step"
    Dh, Dv = query.shape[-1], value.shape[-1]
    extras = extras_of(options, Dh, context.windows[layer])
    if extras.scale is not None and not needs_extras(extras):
        # Every `attend` divides by √Dh. With the rest of the scale in the queries, any `attend` will do.
        query, extras = query * (extras.scale * Dh**0.5), PLAIN
    if Dv < Dh:
        value = F.pad(value, (0, Dh - Dv))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, Hq, Dh], [T, Hkv, Dh]
    out = attend_with(context.attend, layer, q, k, v, extras)  # [T, Hq, Dh]
    return out[None, :, :, :Dv], None


def needs_extras(extras: AttentionExtras) -> bool:
    """Whether a layer needs an `attend` that has extras. A scale alone goes into the queries."""
    return any(name != "scale" for name in extras.names())


def extras_of(options: dict[str, Any], head_dim: int, window: int | None) -> AttentionExtras:
    """The extras of a layer, from the keyword arguments of its call of `attention`. A scale of 1/√Dh is none.

    Raises ValueError, which names the argument, for an argument that is not supported, and as
    `AttentionExtras` does.
    """
    scale, softcap, sinks = None, None, None
    for name, value in options.items():
        if name == "scaling":
            is_usual = value is None or abs(value * head_dim**0.5 - 1) < 1e-9
            scale = None if is_usual else float(value)
        elif name == "softcap":
            softcap = None if value is None else float(value)
        elif name == "s_aux":
            sinks = value
        else:
            _refuse_unless_neutral(name, value)
    return AttentionExtras(scale=scale, window=window, softcap=softcap, sinks=sinks)


def _refuse_unless_neutral(name: str, value: Any) -> None:
    """Raises ValueError if the argument could change the result: if its name or its value is not in NEUTRAL.
    An unknown argument that is None is accepted, since it asks for nothing.
    """
    if name not in NEUTRAL:
        if value is not None:
            raise ValueError(f"the attention's argument {name!r} is not supported")
        return
    neutral_values = NEUTRAL[name]
    if ANY not in neutral_values and not any(value == neutral for neutral in neutral_values):
        raise ValueError(f"the attention's argument {name}={value!r} is not supported")
