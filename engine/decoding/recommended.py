"""The sampling parameters that a model's makers recommend, in its generation_config.json. Part 4.

Promises vLLM's rules: a recommended value takes the place of each field that the user does not give, but
a recommended `max_tokens` is a bound. Reads no file.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from engine.decoding.params import SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """name -> value of the parameters that the content of a generation_config.json recommends.

    `max_tokens` is the file's `max_new_tokens`. Raises ParameterError for a value out of range.
    """
    recommended = {name: generation_config[name] for name in NAMES if generation_config.get(name) is not None}
    max_tokens = generation_config.get("max_new_tokens")
    if max_tokens is not None:
        recommended["max_tokens"] = max_tokens
    SamplingParams(**recommended)  # raises ParameterError
    return recommended


def with_recommended(
    params: SamplingParams, given_names: Collection[str], recommended: Mapping[str, Any]
) -> SamplingParams:
    """`params`, with the recommended value of each field whose name is not in `given_names`.

    A recommended `max_tokens` is a bound instead, on the given one or the default, as in vLLM's server.
    Raises ParameterError if the values contradict each other.
    """
    changes = {name: value for name, value in recommended.items() if name not in given_names}
    bound = recommended.get("max_tokens")
    if bound is not None:
        changes["max_tokens"] = bound if params.max_tokens is None else min(params.max_tokens, bound)
    return replace(params, **changes) if changes else params
