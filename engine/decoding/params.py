"""The parameters of one generation, with the fields of all parts. Part 2.

Promises that each value has the right type and range. Names and meanings are those of vLLM and OpenAI.
refusals.py refuses the fields that the present engine does not implement.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

from engine.decoding.structured import StructuredOutputsParams

Record = TypeVar("Record")  # a dataclass
# Limits, because each new token is compared with all stops of a request. (The server's limits are lower.)
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 20  # likeliest tokens returned for each position
MIN_SIMILARITY = 0.8  # from 0 to 1: how similar a field must be that an error suggests for an unknown name
MAX_SAMPLES = 128  # samples of one prompt; each sample is a sequence with its own keys and values
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # the fields that may be true or false


class RequestOutputKind(Enum):
    """vLLM's kinds of outputs: each has all so far, each has what is new, or there is one at the end. Only
    CUMULATIVE is accepted here.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ParameterError(ValueError):
    """The value of a field is wrong, or not supported here. The attribute `field` is the field's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(ParameterError):
    """The field's value names an object that does not exist, or no longer exists: an adapter (Part 18)."""


class NoRoomError(Exception):
    """There is no room for a request now. The same request may be accepted later."""


def refuse_unknown_names(kind: type[Record]) -> type[Record]:
    """Decorate a dataclass, so that an unknown field raises a TypeError that suggests a similar name."""
    names = [spec.name for spec in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    init: Callable[..., None] = kind.__init__

    @wraps(init)
    def checked_init(self: Record, *values: Any, **named_values: Any) -> None:
        for name in named_values:
            if name not in names:
                close = get_close_matches(name, names, 1, MIN_SIMILARITY)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise TypeError(
                    f"{kind.__name__} has no field {name!r}: {hint}Accepted are {', '.join(names)}"
                )
        init(self, *values, **named_values)

    kind.__init__ = checked_init  # type: ignore[assignment, method-assign]  # a dataclass has one
    return kind


def _from_part(part: int | str, brings: str, default: Any) -> Any:
    """A dataclass field that has an effect from part number `part` on, or from the extension of that letter
    on. `brings` says what the part adds.
    """
    return field(default=default, metadata={"part": part, "brings": brings})


def _neutral_only(default: Any, reason: str) -> Any:
    """A dataclass field of vLLM's whose effect does not exist here. Any value but the default, an empty list
    and an empty dict is refused, for `reason`.
    """
    return field(default=default, metadata={"refused": reason})


@refuse_unknown_names
@dataclass(slots=True)  # so that an assignment to an unknown name fails
class SamplingParams:
    """The parameters of one request, in the order of vLLM's. None means that a field is not given, except for
    `max_tokens`.

    A field may be changed by assignment, which checks nothing. The engine checks and copies the parameters
    when a request is submitted (`clone`), so later changes do not reach a request under way.

    Raises ParameterError for a value of the wrong type or out of range, and TypeError for an unknown name.
    """

    n: int = _from_part(5, "sampling", default=1)  # samples, 1 to MAX_SAMPLES
    presence_penalty: float = _from_part(5, "sampling", default=0.0)  # -2 to 2, once per token in the output
    frequency_penalty: float = _from_part(5, "sampling", default=0.0)  # -2 to 2, per occurrence in the output
    repetition_penalty: float = _from_part(5, "sampling", default=1.0)  # 0.01 to 100, for prompt and output
    # From 0 (greedy) to 1000. None means greedy before Part 5, and 1.0 from Part 5 on.
    temperature: float | None = _from_part(5, "sampling", default=None)
    top_p: float = _from_part(5, "sampling", default=1.0)  # more than 0, up to 1: cumulative probability
    top_k: int = _from_part(5, "sampling", default=0)  # only the k likeliest tokens; 0 or -1: all
    # 0 to 1: only tokens with at least this share of the likeliest token's probability.
    min_p: float = _from_part(5, "sampling", default=0.0)
    seed: int | None = _from_part(5, "sampling", default=None)  # 64 bits, signed; None: a random seed
    stop: Sequence[str] = ()  # a string, or strings, that end the output; kept as a list
    stop_token_ids: Sequence[int] = ()  # tokens that end the output, besides the model's own
    ignore_eos: bool = False  # continue after the model's end-of-sequence token
    max_tokens: int | None = 16  # None: as many tokens as the model's length leaves
    min_tokens: int = 0  # no stop token may be chosen, and no stop string counts, before this many tokens
    # 0 to MAX_LOGPROBS: how many of the likeliest tokens to score beside each token. None: no scores.
    logprobs: int | None = _from_part(10, "logprobs", default=None)
    prompt_logprobs: int | None = _from_part(10, "logprobs", default=None)
    detokenize: bool = True  # without, the output has token ids and no text
    skip_special_tokens: bool = True  # leave tokens such as <|endoftext|> out of the text
    # No tokenizer here puts a space between two special tokens, so both values give the same text.
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the stop string, or the stop token's text, in the text
    truncate_prompt_tokens: int | None = None  # keep only the prompt's last tokens; -1: all that fit
    bad_words: Sequence[str] = ()  # words that are not generated (bad_words.py)
    logit_bias: dict[int, float] | None = _from_part(5, "sampling", default=None)  # token id -> -100 to 100
    # Only these tokens may be chosen.
    allowed_token_ids: Sequence[int] | None = _from_part(5, "sampling", default=None)
    output_kind: RequestOutputKind = _neutral_only(
        RequestOutputKind.CUMULATIVE, "each output here has all text and tokens so far"
    )
    # What the text must fit, such as a JSON schema.
    structured_outputs: StructuredOutputsParams | None = _from_part("B", "structured output", default=None)
    extra_args: Any = _neutral_only(None, "nothing here reads it")
    logits_processors: Any = _neutral_only(
        None, "a step is a record of numbers that any process can compute, and a function is none"
    )
    logprob_token_ids: Any = _neutral_only(None, "`logprobs` scores the likeliest tokens only")
    flat_logprobs: bool = _neutral_only(False, "log probabilities are one map per token here")
    thinking_token_budget: int | None = _neutral_only(None, "no part of an output is known as thinking")

    def __post_init__(self) -> None:
        self._set_defaults()
        self._refuse_fields_without_effect()
        self._check_lists()
        self._check_flags()
        self._check_numbers()
        self._check_structured_outputs()
        self._check_logit_bias()

    def _set_defaults(self) -> None:
        """Give fields that are None their defaults."""
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def _refuse_fields_without_effect(self) -> None:
        """Raise ParameterError for a value of a field that has no effect here (`_neutral_only`)."""
        for name, reason in _REFUSED.items():
            value, default = getattr(self, name), _DEFAULTS.get(name)
            if value not in (default, [], {}):
                raise ParameterError(
                    name, f"{name}={value!r}: only {default!r} is accepted, because {reason}"
                )

    def _check_lists(self) -> None:
        """Copy the fields that are lists, and check their entries and lengths."""
        self.stop = [self.stop] if isinstance(self.stop, str) else _list_of("stop", self.stop, str)
        self.stop_token_ids = _list_of("stop_token_ids", self.stop_token_ids, int)
        self.bad_words = _list_of("bad_words", self.bad_words, str)
        if "" in self.stop:
            raise ParameterError("stop", "stop='' is empty; a stop string has at least one character")
        if any(not word.strip() for word in self.bad_words):
            raise ParameterError(
                "bad_words", f"bad_words={self.bad_words!r}: each word has a character that is no space"
            )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _list_of("allowed_token_ids", self.allowed_token_ids, int)
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", "allowed_token_ids=[] allows no token")
        # How many entries, and how long a stop string.
        limits = (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("bad_words", MAX_BAD_WORDS))
        for name, limit in limits:
            length = len(getattr(self, name))
            if length > limit:
                raise ParameterError(name, f"{name} has {length} entries; at most {limit} are accepted")
        longest_stop = max(map(len, self.stop), default=0)
        if longest_stop > MAX_STOP_CHARACTERS:
            raise ParameterError(
                "stop",
                f"stop has a string of {longest_stop} characters; at most {MAX_STOP_CHARACTERS} are accepted",
            )

    def _check_flags(self) -> None:
        """Check the fields that are true or false."""
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{name}={getattr(self, name)!r}: true or false is accepted")
        if self.stop and not self.detokenize:
            raise ParameterError("stop", f"stop={self.stop!r} needs detokenize=True: it is found in the text")

    def _check_numbers(self) -> None:
        """Check the fields that are numbers."""
        self._check("max_tokens", int, 1, optional=True)
        self._check("min_tokens", int, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        self._check("truncate_prompt_tokens", int, -1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError(
                "truncate_prompt_tokens", "truncate_prompt_tokens=0 leaves no prompt; accepted is -1, or 1 on"
            )
        self._check("temperature", float, 0.0, 1e3, optional=True)
        self._check("top_k", int, -1)
        self._check("top_p", float, 0.0, 1.0)
        if self.top_p == 0:
            raise ParameterError("top_p", "top_p=0 leaves no token; accepted is more than 0, up to 1")
        self._check("min_p", float, 0.0, 1.0)
        self._check("repetition_penalty", float, 0.01, 100.0)  # logits are divided by it
        self._check("frequency_penalty", float, -2.0, 2.0)
        self._check("presence_penalty", float, -2.0, 2.0)
        self._check("seed", int, -(2**63), 2**63 - 1, optional=True)
        self._check("n", int, 1, MAX_SAMPLES)
        self._check("logprobs", int, 0, MAX_LOGPROBS, optional=True)
        self._check("prompt_logprobs", int, 0, MAX_LOGPROBS, optional=True)

    def _check_structured_outputs(self) -> None:
        """Check the type of `structured_outputs`, which has checked its own fields."""
        constraint = self.structured_outputs
        if constraint is not None and not isinstance(constraint, StructuredOutputsParams):
            message = f"structured_outputs={constraint!r}: a StructuredOutputsParams is accepted"
            raise ParameterError("structured_outputs", message)

    def _check_logit_bias(self) -> None:
        """Copy `logit_bias`, and check its entries."""
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise ParameterError(
                "logit_bias", f"logit_bias={self.logit_bias!r}: a map from token id to bias is accepted"
            )
        self.logit_bias = dict(self.logit_bias)
        for token_id, bias in self.logit_bias.items():
            if not _has_type(token_id, int) or not _has_type(bias, float) or not -100 <= bias <= 100:
                entry = f"logit_bias={{{token_id!r}: {bias!r}}}"
                raise ParameterError(
                    "logit_bias", f"{entry}: a token id and a bias of -100 to 100 are accepted"
                )

    def __repr__(self) -> str:
        """All fields but those that only have a neutral value. A temperature of None is shown as 1.0."""
        shown = [spec.name for spec in dataclasses.fields(self) if "refused" not in spec.metadata]
        values = {name: getattr(self, name) for name in shown}
        if self.temperature is None:
            values["temperature"] = 1.0
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def clone(self) -> "SamplingParams":
        """A copy with lists of its own. Raises ParameterError if a field was changed to a wrong value."""
        copied = copy(self)
        copied.__post_init__()
        return copied

    def _check(
        self, name: str, kind: type, low: float, high: float = math.inf, optional: bool = False
    ) -> None:
        """Raises ParameterError if the field is not a `kind` from `low` to `high`, both included.

        With `optional`, None is accepted, too.
        """
        value = getattr(self, name)
        if optional and value is None:
            return
        if not _has_type(value, kind) or not low <= value <= high:
            noun = "a whole number" if kind is int else "a number"
            limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ParameterError(name, f"{name}={value!r}: {noun} {limits} is accepted")


_FIELDS = dataclasses.fields(SamplingParams)
# The defaults of the fields that are never None, by the field's name. A `max_tokens` of None means no limit.
_DEFAULTS = {f.name: f.default for f in _FIELDS if f.default is not None and f.name != "max_tokens"}
_REFUSED = {f.name: f.metadata["refused"] for f in _FIELDS if "refused" in f.metadata}  # name -> reason


def _has_type(value: Any, kind: type) -> bool:
    """isinstance(value, kind), but an int is a float, too, and neither a bool nor NaN is a number.

    `kind` is str, int or float.
    """
    accepted = (int, float) if kind is float else kind
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, accepted) and not isinstance(value, bool) and not is_nan


def _list_of(name: str, values: Any, kind: type) -> list:
    """`values` as a new list. Raises ParameterError if it is not a list or tuple of `kind`."""
    if not isinstance(values, list | tuple) or not _all_have_type(values, kind):
        noun = "strings" if kind is str else "whole numbers"
        raise ParameterError(name, f"{name}={values!r}: a list of {noun} is accepted")
    return list(values)


def _all_have_type(values: Sequence[Any], kind: type) -> bool:
    """Whether each value has the type `kind`, as in `_has_type`."""
    if set(map(type, values)) <= {kind}:  # the usual case, made fast for lists of many token ids
        return True
    return all(_has_type(value, kind) for value in values)  # subclasses of `kind` are accepted, too
