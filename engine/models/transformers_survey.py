"""A look at a model of transformers before its weights are read: can our `attend` serve it? Extension C.

A trial pass on the meta device, which takes no memory, shows what each layer hands to its attention and which
mask it would use. So the sizes of the cache come from the model itself, and a model that does something else
is refused before it can give a wrong token. Promises that in every surveyed model each layer attends once,
through transformers' attention interface, to the tokens before it or to a window of them; and, by a second
trial with the weights, that sequences in one step do not change each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.extras import AttentionExtras, ExtrasAttend, attention_with
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.transformers_attention import attach, extras_of, needs_extras

NAME = "ruvon-survey"  # of the survey's attention function in transformers
NUM_TOKENS = 3  # of the trial pass
LEAK = 0.02  # of the largest number: more is no rounding, in 16 bits either
NEAR = 64  # positions on each side of an edge of a mask at which it is tried
FAR = 8  # tokens past the longest sequence at which a mask is tried


@dataclass(frozen=True)
class Call:
    """What one layer handed to its attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    needs_extras: bool  # whether it wants more of `attend` than q, k and v say


def survey(body: nn.Module, num_layers: int) -> list[Call]:
    """What each layer of `body` hands to its attention: one call for each layer, in order. `body` is a model
    of transformers on the meta device, built with the attention NAME.

    Raises CheckpointError with the reason why our `attend` cannot serve this model.
    """
    calls: list[Call] = []  # to which `survey_attention` adds
    attach(body, calls)
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            body(
                input_ids=tokens,
                position_ids=torch.arange(NUM_TOKENS, device="meta")[None],
                # With a mask for padding, transformers does not look for sequences laid end to end, which
                # cannot be found on the meta device.
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            )
    except CheckpointError:
        raise
    except Exception as error:  # of the library's own code, whatever it may raise
        first_line, *_ = str(error).splitlines() or [""]
        raise CheckpointError(f"a trial pass failed ({type(error).__name__}: {first_line:.200})") from None
    return _checked(calls, num_layers)


def _checked(calls: list[Call], num_layers: int) -> list[Call]:
    """Raises CheckpointError if the layers do not attend once each, in order, with heads of one size."""
    layers = [call.layer for call in calls]
    if layers != list(range(num_layers)):
        raise CheckpointError(f"of {num_layers} layers, these attend: {layers!s:.80}")
    for call in calls:
        if call.value_dim > call.head_dim:
            raise CheckpointError(
                f"keys have {call.head_dim} numbers a head and values {call.value_dim}: values of the same "
                "size or smaller are supported"
            )
        sizes = (call.num_heads, call.num_kv_heads, call.head_dim)
        first = (calls[0].num_heads, calls[0].num_kv_heads, calls[0].head_dim)
        if sizes != first:
            raise CheckpointError(
                f"layer {call.layer} has query heads, key heads and head size {sizes}, and layer 0 {first}: "
                "one size for all layers is supported"
            )
    return calls


def survey_logits(logits: Callable[[Tensor], Tensor], config: ModelConfig) -> None:
    """Raises CheckpointError if the model's output layer does not lead from hidden states to logits."""
    hidden = torch.empty(NUM_TOKENS, config.hidden_size, device="meta", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            shape = tuple(logits(hidden).shape)
    except Exception as error:  # of the library's own code, whatever it may raise
        first_line, *_ = str(error).splitlines() or [""]
        raise CheckpointError(
            f"the output layer cannot be tried ({type(error).__name__}: {first_line:.200})"
        ) from None
    if shape != (NUM_TOKENS, config.vocab_size):
        raise CheckpointError(f"logits of {NUM_TOKENS} tokens have the shape {shape}")


@torch.no_grad()
def refuse_leaks(model: LanguageModel) -> None:
    """Raises CheckpointError if tokens of one sequence reach another that lies behind it, in a model with its
    weights: then they do so elsewhere than in `attend`, as in a convolution over tokens.
    """
    n = NUM_TOKENS
    device = next(model.parameters()).device
    positions = torch.arange(n, device=device).repeat(2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
        """Two sequences of n tokens, each of which sees itself."""
        halves = (slice(0, n), slice(n, 2 * n))
        return torch.cat([attention_with(q[half], k[half], v[half], extras) for half in halves])

    behind = []  # hidden states [n, D] of the second sequence, behind two different ones
    for first in (range(n), range(n, 2 * n)):
        ids = torch.tensor([*first, *range(n)], device=device) % model.config.vocab_size
        behind.append(model(ids, positions, ExtrasAttend(attend))[n:].float())
    difference, largest = float((behind[0] - behind[1]).abs().max()), float(behind[0].abs().max())
    if difference > LEAK * largest:
        raise CheckpointError(
            "tokens of a sequence change those of another that shares a step with it, by "
            f"{difference:.2g} of {largest:.2g}"
        )


def survey_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the trial pass: writes down what it is given. query[1, Hq, T, Dh], key and
    value[1, Hkv, T, Dh] -> ([1, T, Hq, Dv], None), without numbers.
    """
    layer = getattr(module, "layer_idx", None)
    if type(layer) is not int:
        raise CheckpointError(f"{type(module).__name__} does not know its layer's number")
    if not hasattr(attention_mask, "ruvon_window"):
        raise CheckpointError(f"layer {layer} has a mask of its own making")
    window = attention_mask.ruvon_window
    (_, Hq, T, Dh), Hkv, Dv = query.shape, key.shape[1], value.shape[-1]
    try:
        extras = extras_of(options, Dh, window)
    except ValueError as error:
        raise CheckpointError(f"layer {layer}: {error}") from None
    module.ruvon_step.append(Call(layer, Hq, Hkv, Dh, Dv, window, needs_extras(extras)))
    return query.new_empty(1, T, Hq, Dv), None


def survey_mask(*, mask_function: Callable, config: Any, device: Any = None, **options: Any) -> Tensor:
    """The mask function of the trial pass: a mask without numbers that knows its window, as `ruvon_window`.

    Raises CheckpointError if a token sees others than those before it, or than a window of them.
    """
    mask = torch.empty(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device="meta")
    longest = getattr(config, "max_position_embeddings", None) or 1
    window = window_of(mask_function, longest + FAR)
    if window is not None and window >= longest:
        window = None
    mask.ruvon_window = window  # type: ignore[attr-defined]  # nobody but survey_attention reads it
    return mask


def window_of(mask_function: Callable, last: int) -> int | None:
    """How many tokens each token sees, its own among them; None if it sees all tokens up to its own.
    `mask_function(batch, head, query position, key position)` is transformers' form of a mask; positions up
    to `last` are tried.

    Raises CheckpointError if a token sees others than those.
    """

    def seen(query: int, keys: Tensor) -> Tensor:
        """[K]: whether this query sees each of keys[K]."""
        zero = torch.zeros((), dtype=torch.long)
        result = mask_function(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(result, dtype=torch.bool).expand(len(keys))

    # 1. The first key that the last query sees, if it sees all behind it: by halving.
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(last, torch.tensor([middle])) else (middle + 1, high)
    width = last - low + 1
    # 2. Whether the mask is this window: for queries and keys near every edge, and some between.
    for query in sorted({0, 1, width - 1, min(width, last), min(width + 1, last), last // 2, last}):
        edges = torch.tensor([0, query - width, query, last]).clamp(min=0)
        near = (edges[:, None] + torch.arange(-NEAR, NEAR)).flatten()
        keys = torch.cat((near, torch.linspace(0, last, NEAR).long())).clamp(0, last + 1).unique()  # [K]
        wrong = seen(query, keys) != (keys <= query) & (keys > query - width)
        if wrong.any():
            raise CheckpointError(
                f"position {query} sees other positions than those before it or a window of them, as to "
                f"position {int(keys[wrong][0])}"
            )
    return width if width <= last else None
