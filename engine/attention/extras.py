"""Attention with extras, which the layers of some models need: a window, a soft cap, sinks, another scale.

The extras are an argument of each call, since they differ from layer to layer: `attend_with(attend, layer, q,
k, v, extras)`. An `attend` that supports extras is an `ExtrasAttend`. For any other `attend`, `attend_with`
refuses extras by name. Without extras, the result is that of `dense.py`. This module does not know where keys
and values are stored: `extras_paged.py` reads them in pages. Extension C.
Sources: windows: Jiang et al. 2023, https://arxiv.org/abs/2310.06825; soft caps: Gemma Team 2024,
https://arxiv.org/abs/2408.00118; sinks: OpenAI 2025, https://arxiv.org/abs/2508.10925.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.attention.interface import Attend


@dataclass(frozen=True, eq=False)
class AttentionExtras:
    """The extras of one layer. A field that is None changes nothing. Raises ValueError for a scale or a soft
    cap that is not above 0, and for a window that is no whole number from 1 on.
    """

    scale: float | None = None  # the factor of q·k; None is 1/√Dh
    window: int | None = None  # a query sees the last `window` keys, its own among them
    softcap: float | None = None  # a score s becomes softcap · tanh(s / softcap), before the mask
    # [Hq]: for each query head, the score of one additional key, whose value is 0.
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # `not value > 0` also refuses NaN
                raise ValueError(f"{name}={value!r}: a number above 0 is accepted")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window={self.window!r}: a whole number from 1 on is accepted")

    def names(self) -> list[str]:
        """The names of the fields that are set, in the order of the class."""
        return [spec.name for spec in fields(self) if getattr(self, spec.name) is not None]


PLAIN = AttentionExtras()  # no extras: attention as in dense.py


class ExtrasAttend:
    """An `Attend` (interface.py) that also takes extras, as a fifth argument.

    A class and not a function, so that `attend_with` can recognize it.
    """

    def __init__(self, attend: Callable[[int, Tensor, Tensor, Tensor, AttentionExtras], Tensor]) -> None:
        """`attend(layer, q, k, v, extras)` computes the attention, and always gets all five arguments."""
        self._attend = attend

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras = PLAIN
    ) -> Tensor:
        """q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh] -> [T, Hq, Dh]."""
        return self._attend(layer, q, k, v, extras)


def attend_with(
    attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras
) -> Tensor:
    """`attend(layer, q, k, v)` with the layer's extras: q[T, Hq, Dh], k and v[T, Hkv, Dh] -> [T, Hq, Dh].

    Raises ValueError, which names the fields that are set, if there are any and `attend` does not support
    extras.
    """
    if isinstance(attend, ExtrasAttend):
        return attend(layer, q, k, v, extras)
    names = extras.names()
    if names:
        raise ValueError(
            f"layer {layer} wants {', '.join(names)}, and the attention that was handed in does not have it; "
            "`causal` of engine.attention.extras does, and so do pages (engine.cache.extras)"
        )
    return attend(layer, q, k, v)


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key, from the positions of both, whose shapes are broadcast.

    query[Tq, 1], key[Tk] -> [Tq, Tk]. No query sees a later key. With a window, it sees the last `window`
    keys, its own among them: with 3, position 5 sees 3, 4 and 5.
    """
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def first_visible(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def weights_of(scores: Tensor, seen: Tensor, extras: AttentionExtras) -> Tensor:
    """scores[..., Hq, Tq, Tk] -> weights[..., Hq, Tq, Tk] in fp32, by which the values are averaged.

    The scores are scaled already. seen[..., Tq, Tk] says which keys each query sees. The weights of a row sum
    to 1, or with a sink to less: the sink has a weight, too, and its value is 0.
    """
    scores = scores.float()
    if extras.softcap is not None:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if extras.sinks is None:
        return scores.softmax(-1)
    sinks = extras.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)  # [..., Hq, Tq, 1]
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


def dense_extras_attention(q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
    """Attention of one sequence's last Tq tokens over its last Tk ≥ Tq tokens, exactly as the formula.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]. With a window, `k` and `v` may leave out
    tokens that no query sees.
    """
    (Tq, Hq, Dh), (Tk, Hkv, _) = q.shape, k.shape
    scale = Dh**-0.5 if extras.scale is None else extras.scale
    queries = (q * scale).view(Tq, Hkv, Hq // Hkv, Dh).permute(1, 2, 0, 3)  # [Hkv, G, Tq, Dh]
    scores = queries @ k.permute(1, 2, 0)[:, None]  # [Hkv, G, Tq, Tk]
    positions = torch.arange(Tk, device=q.device)
    seen = visible(positions[Tk - Tq :, None], positions, extras.window)  # [Tq, Tk]
    weights = weights_of(scores.view(Hq, Tq, Tk), seen, extras).to(v.dtype)  # [Hq, Tq, Tk]
    out = weights.view(Hkv, -1, Tk) @ v.transpose(0, 1)  # [Hkv, G · Tq, Dh]
    return out.view(Hq, Tq, Dh).transpose(0, 1)  # [Tq, Hq, Dh]


@ExtrasAttend
def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
    """`causal` of dense.py with extras: the T tokens are one whole sequence, and no key or value is stored.

    q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh] -> [T, Hq, Dh].
    """
    return dense_extras_attention(q, k, v, extras)


def bind_extras(attend: Attend, extras: Sequence[AttentionExtras]) -> Attend:
    """An `Attend` that calls `attend` with the extras of the layer, from extras[L].

    So the code of a model's layers need not know of extras.
    """

    def attend_bound(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_with(attend, layer, q, k, v, extras[layer])

    return attend_bound
