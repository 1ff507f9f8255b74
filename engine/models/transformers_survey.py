"""Trial passes of a model of transformers, before it is used: can our `attend` serve it? Extension C.

The first trial pass (`survey`) runs on the meta device, where tensors have shapes and no numbers. It shows
what each layer hands to its attention, and which mask the layer would use. So the sizes of the cache come
from the model itself, and most models that `attend` cannot serve are refused before their weights are read.
The second trial pass (`refuse_leaks`) has the weights. It shows whether the first of two sequences in one
step changes the second.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.extras import AttentionExtras, ExtrasAttend, dense_extras_attention
from engine.models.checkpoint import CheckpointError, first_line
from engine.models.language_model import LanguageModel
from engine.models.transformers_attention import attach, extras_of, needs_extras
from engine.models.transformers_mask import MaskFunction, window_of

NAME = "ruvon-survey"  # of the survey's attention function in transformers
NUM_TOKENS = 3  # of a sequence in a trial pass
MAX_ROUNDING = 0.02  # share of the largest number; a larger difference is no rounding, even in 16 bits
FAR = 8  # positions past the longest sequence at which a mask is compared


@dataclass(frozen=True)
class AttentionCall:
    """What one layer handed to its attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # the head size of values
    window: int | None  # how many tokens each token sees, itself included; None: all tokens up to itself
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
    """Raises CheckpointError if the layers do not attend once each, in order, if values are larger than keys,
    or if the heads of two layers differ in number or size.
    """
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


def survey_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the first trial pass: adds an `AttentionCall` to the survey's list, and
    computes nothing. The list is `module.ruvon_context`.

    query[1, Hq, T, Dh], key[1, Hkv, T, Dh], value[1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None), without numbers.

    Raises CheckpointError if the layer's number or the mask is not known, or if an argument is not supported.
    """
    layer = getattr(module, "layer_idx", None)
    if type(layer) is not int:
        raise CheckpointError(f"{type(module).__name__} does not know its layer's number")
    if not hasattr(attention_mask, "ruvon_window"):  # `survey_mask` did not make it
        raise CheckpointError(f"layer {layer} has a mask of its own making")
    _, Hq, T, Dh = query.shape
    Dv = value.shape[-1]
    try:
        extras = extras_of(options, Dh, attention_mask.ruvon_window)
    except ValueError as error:
        raise CheckpointError(f"layer {layer}: {error}") from None
    call = AttentionCall(
        layer=layer,
        num_heads=Hq,
        num_kv_heads=key.shape[1],
        head_dim=Dh,
        value_dim=Dv,
        window=extras.window,
        needs_extras=needs_extras(extras),
    )
    module.ruvon_context.append(call)
    return query.new_empty(1, T, Hq, Dv), None


def survey_mask(*, mask_function: MaskFunction, config: Any, **options: Any) -> Tensor:
    """The mask function of the first trial pass: a mask on the meta device, whose attribute `ruvon_window` is
    the window of `mask_function` (`window_of`), or None if the window is as long as the longest sequence.

    Raises CheckpointError as `window_of` does.
    """
    # A model that does not say its longest sequence passes here; `config_from` then refuses it by name.
    longest = getattr(config, "max_position_embeddings", None) or 1
    window = window_of(mask_function, longest + FAR)
    if window is not None and window >= longest:
        window = None
    mask = torch.empty(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device="meta")
    mask.ruvon_window = window  # type: ignore[attr-defined]  # only survey_attention reads it
    return mask


def refuse_other_logits(model: LanguageModel) -> None:
    """Raises CheckpointError if the model's `logits` does not compute logits[R, V] from hidden[R, D].
    `model` is on the meta device.
    """
    hidden = torch.empty(NUM_TOKENS, model.config.hidden_size, device="meta", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            shape = tuple(model.logits(hidden).shape)
    except Exception as error:  # the library's code may raise any error
        raise CheckpointError(f"the output layer cannot be tried ({_short(error)})") from None
    if shape != (NUM_TOKENS, model.config.vocab_size):
        raise CheckpointError(f"logits of {NUM_TOKENS} tokens have the shape {shape}")


def refuse_leaks(model: LanguageModel) -> None:
    """Raises CheckpointError if a sequence changes the hidden states of the next sequence in the same step.
    `model` has its weights.

    `attend` keeps sequences apart, so such a model mixes tokens elsewhere, as in a convolution over tokens.
    """
    ids = torch.arange(NUM_TOKENS)
    after_itself = _hidden_of_second(model, first_ids=ids, second_ids=ids)
    after_another = _hidden_of_second(model, first_ids=ids + NUM_TOKENS, second_ids=ids)
    difference = float((after_itself - after_another).abs().max())
    largest = float(after_itself.abs().max())
    if not math.isfinite(difference) or difference > MAX_ROUNDING * largest:
        raise CheckpointError(
            "tokens of a sequence change those of another that shares a step with it, by "
            f"{difference:.2g} of {largest:.2g}"
        )


@torch.no_grad()
def _hidden_of_second(model: LanguageModel, first_ids: Tensor, second_ids: Tensor) -> Tensor:
    """The hidden states [n, D], in fp32, of the second of two sequences of n tokens that share a step."""
    n = len(first_ids)
    device = next(model.parameters()).device
    token_ids = torch.cat([first_ids, second_ids]).to(device) % model.config.vocab_size
    positions = torch.arange(n, device=device).repeat(2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
        """Attention of both sequences, each of which sees itself only."""
        first = dense_extras_attention(q[:n], k[:n], v[:n], extras)
        second = dense_extras_attention(q[n:], k[n:], v[n:], extras)
        return torch.cat([first, second])

    return model(token_ids, positions, ExtrasAttend(attend))[n:].float()


def _short(error: Exception) -> str:
    """The kind of an error, and the beginning of its message."""
    return f"{type(error).__name__}: {first_line(error):.200}"
