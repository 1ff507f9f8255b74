"""Our `attend` as an attention function of the library transformers. Extension C.

Hugging Face's models look up their attention by name (`AttentionInterface`). Under the name NAME they get
`attention`, which hands q, k and v of the flat token row to the `attend` of the step. What a layer wants
beside them arrives as arguments: a scale, a soft cap, sinks. Each is passed on. An argument that this module
does not know is refused, since dropping it could change the result without a word. Masks never arrive: which
token sees which is the business of `attend`, and transformers_survey.py has compared both beforehand.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.extras import PLAIN, AttentionExtras, attend_with
from engine.attention.interface import Attend

NAME = "ruvon"  # of our attention function in transformers
# Arguments that change nothing here, and the values with which they do not. None: any value.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "position_ids": None,  # the positions that the model was given: `attend` knows them
    "cache_position": None,
    "use_cache": None,  # there is no cache of transformers'
    "past_key_values": (None,),
    "past_key_value": (None,),
    "dropout": (0.0,),
    "is_causal": (True, None),
    "sliding_window": None,  # the survey has read the window from the mask
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "output_router_logits": (False, None),
    "head_mask": (None,),
    "return_dict": None,
}


class Step:
    """Where the layers of one model find the `attend` of the step under way, and their windows."""

    def __init__(self, windows: tuple[int | None, ...] = ()) -> None:
        self.attend: Attend | None = None
        self.windows = windows  # [L]: how many tokens a layer sees; None: all


def attach(body: nn.Module, step: Any) -> None:
    """Let every module of `body` that knows its layer's number find `step`, as `ruvon_step`: a Step, or what
    the survey has in its place.
    """
    for module in body.modules():
        if hasattr(module, "layer_idx"):
            module.ruvon_step = step


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """query[1, Hq, T, Dh], key[1, Hkv, T, Dh], value[1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None). The None
    stands for the weights of the attention, which nobody asks for. Values smaller than keys (DeepSeek's) are
    stored with zeros behind them, since keys and values have one size in our caches.

    Raises ValueError, which names the argument, for one that is not supported.
    """
    step: Step = module.ruvon_step
    layer = module.layer_idx
    assert step.attend is not None, "a layer attends outside of a step"
    extras = extras_of(options, query.shape[-1], step.windows[layer])
    if extras.scale is not None and not needs_extras(extras):
        query, extras = query * (extras.scale * query.shape[-1] ** 0.5), PLAIN  # any `attend` divides by √Dh
    Dh, Dv = query.shape[-1], value.shape[-1]
    if Dv < Dh:
        value = F.pad(value, (0, Dh - Dv))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, Hq, Dh], [T, Hkv, Dh]
    out = attend_with(step.attend, layer, q, k, v, extras)  # [T, Hq, Dh]
    return out[None, :, :, :Dv], None


def needs_extras(extras: AttentionExtras) -> bool:
    """Whether a layer needs an `attend` that has extras. A scale alone goes into the queries."""
    return any(name != "scale" for name in extras.names())


def extras_of(options: dict[str, Any], head_dim: int, window: int | None) -> AttentionExtras:
    """What a layer wants beside q, k and v, from the arguments of an attention function of transformers.

    Raises ValueError, which names the argument, for one that is not supported.
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
        elif name not in NEUTRAL:
            if value is not None:
                raise ValueError(f"the attention's argument {name!r} is not supported")
        elif (values := NEUTRAL[name]) is not None and not any(value == other for other in values):
            raise ValueError(f"the attention's argument {name}={value!r} is not supported")
    return AttentionExtras(scale, window, softcap, sinks)
