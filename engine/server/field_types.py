"""The types of the fields of all routes: numbers, names, texts, prompts, stops. Part 4.

Each type checks that the value is of this type, and most also check its length. Not so a prompt's text or
ids: the body's size bounds them, and then the engine. Ranges of numbers are only described here, for
/openapi.json (`bounds`): the engine checks them, and its messages say more than pydantic's.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, StrictFloat, StrictInt, StrictStr, Tag
from pydantic_core import PydanticCustomError

from engine.server.limits import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    PLAIN_ID,
)

TOKEN_ID = "0|[1-9][0-9]{0,9}"  # a key of `logit_bias`: no sign, no leading zeros


def tag_by_type(tags: Mapping[type, str]) -> Callable[[Any], str | None]:
    """For a Discriminator: a function that returns the tag of a value's type, or None if no type fits. `tags`
    maps types to their tags.

    pydantic checks the value against the type with this tag only, so that an error is about that type.
    """

    def tag_of(value: Any) -> str | None:
        for kind, tag in tags.items():
            if isinstance(value, kind):
                return tag
        return None

    return tag_of


def prompt_or_stop_kind(value: Any) -> str | None:
    """The tag of `value` in `Prompts` and `StopOrStops`, judged by the first item of a list.

    None for what is neither text nor list. pydantic checks `value` against the type with this tag only. A tag
    that the union does not have (a stop of "ids") is refused with the union's message.
    """
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "lists of ids"
    return "ids" if isinstance(first, int) else "texts"


def _refuse_too_many_biases(biases: Any) -> Any:
    """Return `biases` unchanged. Raises PydanticCustomError for more than MAX_LOGIT_BIAS entries.

    pydantic's own `max_length` would check every entry before it counts the entries.
    """
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_long", f"at most {MAX_LOGIT_BIAS} entries are accepted, not {len(biases)}"
        )
    return biases


def _number(value: Any) -> Any:
    """Return `value` unchanged. Raises PydanticCustomError if `value` is not a number.

    pydantic's own error would name only the first type of the union, and ask for an integer.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number_type", "Input should be a valid number")
    return value


def _integer(value: Any) -> Any:
    """5 for 5.0: for JSON Schema, a number without a fraction is an integer. Other values are unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bounds(**keywords: Any) -> Any:
    """Bounds for /openapi.json, as JSON Schema keywords. pydantic does not check these bounds: the engine
    does, with an error message that says more.
    """
    return Field(json_schema_extra=keywords)


# `fail_fast` ends the check of a list at the first wrong item. A complaint about each wrong item would take
# many times the memory of the body, and the answer tells only the first complaint.
Number = Annotated[StrictInt | StrictFloat, BeforeValidator(_number)]
Integer = Annotated[StrictInt, BeforeValidator(_integer)]
Name = Annotated[StrictStr, Field(max_length=MAX_NAME_CHARACTERS)]
Salt = Annotated[Name, Field(min_length=1)]
RequestName = Annotated[StrictStr, Field(pattern=f"^{PLAIN_ID}$")]
Texts = Annotated[
    list[Annotated[StrictStr, bounds(minLength=1)]], Field(max_length=MAX_PROMPTS, fail_fast=True)
]
TokenId = Annotated[StrictInt, bounds(minimum=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Stop = Annotated[StrictStr, Field(max_length=MAX_STOP_CHARACTERS, json_schema_extra={"minLength": 1})]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
BadWord = Annotated[
    StrictStr, Field(max_length=MAX_BAD_WORD_CHARACTERS, json_schema_extra={"minLength": 1, "pattern": r"\S"})
]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
Biases = Annotated[
    dict[str, Annotated[Number, bounds(minimum=-100, maximum=100)]],
    bounds(propertyNames={"pattern": f"^({TOKEN_ID})$"}, maxProperties=MAX_LOGIT_BIAS),
    BeforeValidator(_refuse_too_many_biases),
]
Prompts = Annotated[
    Annotated[StrictStr, bounds(minLength=1), Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[TokenIdLists, Tag("lists of ids")],
    Discriminator(prompt_or_stop_kind, "prompt_kind", "a text, token ids, or a list of either is accepted"),
]
StopOrStops = Annotated[
    Annotated[Stop, Tag("text")] | Annotated[Stops, Tag("texts")],
    Discriminator(prompt_or_stop_kind, "stop_kind", "a text or a list of texts is accepted"),
]
