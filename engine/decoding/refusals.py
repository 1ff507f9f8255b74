"""Refuses parameters that would have no effect with the present engine, or no meaning for its model. Part 2.

Promises that no field is silently ignored: a value whose effect the present engine does not implement is
refused, and the error names the field and the part that adds it.
"""

import dataclasses

from engine.decoding.params import ParameterError, SamplingParams

# Beside the defaults, what an engine without sampling does anyway: greedy, all tokens.
NEUTRAL = [("temperature", 0), ("top_k", -1)]
LATER_FIELDS = [spec for spec in dataclasses.fields(SamplingParams) if "part" in spec.metadata]


def refuse_unsupported(params: SamplingParams, supports: frozenset[str]) -> None:
    """Raises ParameterError if a field asks for an effect of a later part and its name is not in `supports`.

    A field whose value has no effect, such as its default, is accepted.
    """
    for spec in LATER_FIELDS:
        name, value = spec.name, getattr(params, spec.name)
        if name in supports or value == spec.default or (name, value) in NEUTRAL:
            continue
        part, adds = spec.metadata["part"], spec.metadata["brings"]
        title = f"Part {part}" if isinstance(part, int) else f"Extension {part}"
        raise ParameterError(name, f"{name}={value!r} is not supported here: {title} ({adds}) brings it")


def refuse_unknown_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raises ParameterError for a token id in `params` that is not from 0 to `vocab_size` - 1."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        token_ids = getattr(params, name) or ()
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            continue  # the usual case, made fast
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ParameterError(
                    name, f"{name} has token id {token_id}; accepted are 0 to {vocab_size - 1}"
                )
