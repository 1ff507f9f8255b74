"""Trial passes of a model of transformers, before it is used: can our `attend` serve it? Extension C.

The first trial pass runs on the meta device, where tensors have shapes and no numbers. It shows what each
layer hands to its attention, and which mask the layer would use. So the sizes of the cache come from the
model itself, and a model that does something else is refused before its weights are read. A second trial,
with the weights, shows whether the first of two sequences in one step changes the second.

Promises, of every model that is not refused: each layer attends once, through transformers' attention
interface; wherever its mask was compared (`window_of`), a token saw itself and all tokens before it, or the
last few of them; and in a trial of two short sequences in one step, the first did not change the second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.extras import AttentionExtras, ExtrasAttend, dense_extras_attention
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.transformers_attention import attach, extras_of, needs_extras

NAME = "ruvon-survey"  # of the survey's attention function in transformers
NUM_TOKENS = 3  # of a sequence in a trial pass
MAX_ROUNDING = 0.02  # share of the largest number; a larger difference is no rounding, even in 16 bits
NEAR = 64  # positions on each side of an edge of a mask at which the mask is compared
FAR = 8  # positions past the longest sequence at which a mask is compared


@dataclass(frozen=True)
class AttentionCall:
    """What one layer handed to its attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    needs_extras: bool  # whether the layer needs more of `attend` than q, k and v say


def survey(decoder: nn.Module, num_layers: int) -> list[AttentionCall]:
    """What each layer hands to its attention: one call for each layer, in order. `decoder` is a decoder of
    transformers on the meta device, built with the attention NAME.

    Raises CheckpointError with the reason why our `attend` cannot serve this model.
    """
    calls: list[AttentionCall] = []  # to which `survey_attention` adds
    attach(decoder, calls)
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            decoder(
                input_ids=tokens,
                position_ids=torch.arange(NUM_TOKENS, device="meta")[None],
                # Without a mask, transformers would read the positions to find sequences that lie end to end,
                # and tensors on the meta device cannot be read.
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            )
    except CheckpointError:
        raise
    except Exception as error:  # the library's code may raise any error
        raise CheckpointError(f"a trial pass failed ({_short(error)})") from None
    _check_calls(calls, num_layers)
    return calls


def _check_calls(calls: list[AttentionCall], num_layers: int) -> None:
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
        first_sizes = (calls[0].num_heads, calls[0].num_kv_heads, calls[0].head_dim)
        if sizes != first_sizes:
            raise CheckpointError(
                f"layer {call.layer} has query heads, key heads and head size {sizes}, and layer 0 "
                f"{first_sizes}: one size for all layers is supported"
            )


def refuse_other_logits(logits: Callable[[Tensor], Tensor], config: ModelConfig) -> None:
    """Raises CheckpointError if `logits` does not compute logits[R, V] from hidden[R, D]. It must run on the
    meta device.
    """
    hidden = torch.empty(NUM_TOKENS, config.hidden_size, device="meta", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            shape = tuple(logits(hidden).shape)
    except Exception as error:  # the library's code may raise any error
        raise CheckpointError(f"the output layer cannot be tried ({_short(error)})") from None
    if shape != (NUM_TOKENS, config.vocab_size):
        raise CheckpointError(f"logits of {NUM_TOKENS} tokens have the shape {shape}")


def first_line(error: Exception) -> str:
    """The first line of an error's message; "" without a message."""
    line, *_ = str(error).splitlines() or [""]
    return line


def _short(error: Exception) -> str:
    """The kind of an error, and the beginning of its message."""
    return f"{type(error).__name__}: {first_line(error):.200}"


@torch.no_grad()
def refuse_leaks(model: LanguageModel) -> None:
    """Raises CheckpointError if a sequence changes the hidden states of the next sequence in the same step.
    `model` has its weights.

    `attend` keeps sequences apart, so such a model mixes tokens elsewhere, as in a convolution over tokens.
    """
    n = NUM_TOKENS
    device = next(model.parameters()).device
    positions = torch.arange(n, device=device).repeat(2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
        """Attention of two sequences of n tokens, end to end, each of which sees itself only."""
        first, second = slice(0, n), slice(n, 2 * n)
        return torch.cat(
            [dense_extras_attention(q[part], k[part], v[part], extras) for part in (first, second)]
        )

    results = []  # hidden[n, D] of the same second sequence, after two different first sequences
    for first_ids in (range(n), range(n, 2 * n)):
        ids = torch.tensor([*first_ids, *range(n)], device=device) % model.config.vocab_size
        results.append(model(ids, positions, ExtrasAttend(attend))[n:].float())
    difference = float((results[0] - results[1]).abs().max())
    largest = float(results[0].abs().max())
    if not difference <= MAX_ROUNDING * largest:  # so NaN is refused, too
        raise CheckpointError(
            "tokens of a sequence change those of another that shares a step with it, by "
            f"{difference:.2g} of {largest:.2g}"
        )


def survey_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the first trial pass: collects an `AttentionCall`, and computes nothing.

    query[1, Hq, T, Dh], key[1, Hkv, T, Dh], value[1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None), without numbers.

    Raises CheckpointError if the layer's number or the mask is not known, or if an argument is not supported.
    """
    layer = getattr(module, "layer_idx", None)
    if type(layer) is not int:
        raise CheckpointError(f"{type(module).__name__} does not know its layer's number")
    if not hasattr(attention_mask, "ruvon_window"):  # `survey_mask` did not make it
        raise CheckpointError(f"layer {layer} has a mask of its own making")
    window = attention_mask.ruvon_window
    (_, Hq, T, Dh), Hkv, Dv = query.shape, key.shape[1], value.shape[-1]
    try:
        extras = extras_of(options, Dh, window)
    except ValueError as error:
        raise CheckpointError(f"layer {layer}: {error}") from None
    calls = module.ruvon_context  # `survey` attached its list
    calls.append(AttentionCall(layer, Hq, Hkv, Dh, Dv, window, needs_extras(extras)))
    return query.new_empty(1, T, Hq, Dv), None


def survey_mask(*, mask_function: Callable, config: Any, device: Any = None, **options: Any) -> Tensor:
    """The mask function of the first trial pass: a mask on the meta device, whose attribute `ruvon_window` is
    the window of `mask_function` (`window_of`). A window as long as the longest sequence is none.

    Raises CheckpointError as `window_of` does.
    """
    mask = torch.empty(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device="meta")
    # A model that does not say its longest sequence passes here; `_max_positions` then refuses it by name.
    longest = getattr(config, "max_position_embeddings", None) or 1
    window = window_of(mask_function, longest + FAR)
    if window is not None and window >= longest:
        window = None
    mask.ruvon_window = window  # type: ignore[attr-defined]  # only survey_attention reads it
    return mask


def window_of(mask_function: Callable, last: int) -> int | None:
    """How many tokens each token sees, itself included; None if it sees all tokens up to itself.
    `mask_function(batch, head, query position, key position)` is transformers' form of a mask. A mask
    has too many pairs to compare them all: at most seven queries up to `last` are compared, each with some
    hundreds of keys up to `last` + 1.

    Raises CheckpointError if one of the compared pairs differs.
    """

    def seen(query: int, keys: Tensor) -> Tensor:
        """[K]: whether this query sees each of keys[K]."""
        zero = torch.zeros((), dtype=torch.long)
        result = mask_function(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(result, dtype=torch.bool).expand(len(keys))

    # 1. The first key that the last query sees, if the query sees all keys from there on: by bisection.
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if seen(last, torch.tensor([middle])):
            high = middle
        else:
            low = middle + 1
    width = last - low + 1
    # 2. Compare the mask with this window where another mask would differ. Queries: the first two, the three
    # around the first that does not see key 0 (`width`), one halfway, and the last. Keys: those near the ends
    # of the sequence and of the window, and some in between.
    for query in sorted({0, 1, width - 1, min(width, last), min(width + 1, last), last // 2, last}):
        edges = torch.tensor([0, query - width, query, last]).clamp(min=0)
        near_edges = (edges[:, None] + torch.arange(-NEAR, NEAR + 1)).flatten()
        between = torch.linspace(0, last, NEAR).long()
        keys = torch.cat((near_edges, between)).clamp(0, last + 1).unique()  # [K]
        in_window = (keys <= query) & (keys > query - width)
        wrong = seen(query, keys) != in_window
        if wrong.any():
            raise CheckpointError(
                f"position {query} sees other positions than those before it or a window of them, as to "
                f"position {int(keys[wrong][0])}"
            )
    return width if width <= last else None
