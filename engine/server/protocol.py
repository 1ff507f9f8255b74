"""The fields of OpenAI's completions API, and how they become the engine's own. Part 4.

Promises that every field accepted has its effect: a field nobody knows, or one that this server's engine does
not support, is refused by name. Shapes: https://platform.openai.com/docs/api-reference/completions
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError as Complaint

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import MAX_LOGPROBS, ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.errors import RequestError
from engine.server.limits import (
    MAX_CHOICES,
    MAX_COMPLETION_LOGPROBS,
    MAX_LOGIT_BIAS,
    MAX_NAME_CHARACTERS,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)

TOKEN_ID = "0|[1-9][0-9]{0,9}"  # as a key of a JSON object: written plainly
DEFAULT_MAX_TOKENS = SamplingParams.max_tokens


def _kind(value: Any) -> str | None:
    """Which of the kinds below a value is meant to be, by its first item. Only that kind's check is run."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "lists of ids" if isinstance(first, list) else "ids" if isinstance(first, int) else "texts"


def _few(entries: Any) -> Any:
    """pydantic would look at each entry before it counts them."""
    if isinstance(entries, dict) and len(entries) > MAX_LOGIT_BIAS:
        raise Complaint("too_long", f"at most {MAX_LOGIT_BIAS} entries are accepted, not {len(entries)}")
    return entries


def _number(value: Any) -> Any:
    """pydantic would say that an integer is wanted: the first of the two."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Complaint("number_type", "Input should be a valid number")
    return value


def within(kind: Any, **bounds: Any) -> Any:
    """`kind`, with bounds for who reads the API's description. The engine checks them, and says more."""
    return Annotated[kind, Field(json_schema_extra=bounds)]


# A list's check ends at the first item that is wrong (`fail_fast`): a complaint about each would take many
# times the memory of the body, and one is all that an answer has room for.
Number = Annotated[StrictInt | StrictFloat, BeforeValidator(_number)]
Name = Annotated[StrictStr, Field(max_length=MAX_NAME_CHARACTERS)]
Texts = Annotated[list[within(StrictStr, minLength=1)], Field(max_length=MAX_PROMPTS, fail_fast=True)]
TokenId = within(StrictInt, minimum=0)
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Stop = Annotated[StrictStr, Field(max_length=MAX_STOP_CHARACTERS, json_schema_extra={"minLength": 1})]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
Biases = within(
    dict[str, within(Number, minimum=-100, maximum=100)],
    propertyNames={"pattern": f"^({TOKEN_ID})$"},
    maxProperties=MAX_LOGIT_BIAS,
)
Prompts = Annotated[
    Annotated[within(StrictStr, minLength=1), Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[TokenIdLists, Tag("lists of ids")],
    Discriminator(_kind, "prompt_kind", "a text, token ids, or a list of either is accepted"),
]
StopOrStops = Annotated[
    Annotated[Stop, Tag("text")] | Annotated[Stops, Tag("texts")],
    Discriminator(_kind, "stop_kind", "a text or a list of texts is accepted"),
]


class Fields(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _not_more_names_than_needed(cls, body: Any) -> Any:
        """If there are more names than fields, one of the first ones is unknown: the rest need no look."""
        return dict(islice(body.items(), len(cls.model_fields) + 1)) if isinstance(body, dict) else body


class StreamOptions(Fields):
    include_usage: StrictBool | None = None
    include_obfuscation: within(StrictBool, const=False) | None = None


class SamplingFields(Fields):
    """What completions and chats (Part 14) have in common."""

    model: Name
    max_tokens: within(StrictInt, minimum=0) | None = None
    temperature: within(Number, minimum=0, maximum=1000) | None = None
    top_p: within(Number, exclusiveMinimum=0, maximum=1) | None = None
    n: within(StrictInt, minimum=1, maximum=MAX_CHOICES) | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: StopOrStops | None = None
    presence_penalty: within(Number, minimum=-2, maximum=2) | None = None
    frequency_penalty: within(Number, minimum=-2, maximum=2) | None = None
    logit_bias: Annotated[Biases, BeforeValidator(_few)] | None = None
    seed: within(StrictInt, minimum=-(2**63), maximum=2**63 - 1) | None = None
    user: Name | None = None

    top_k: within(StrictInt, minimum=-1) | None = None
    min_p: within(Number, minimum=0, maximum=1) | None = None
    repetition_penalty: within(Number, minimum=0.01, maximum=100) | None = None
    min_tokens: within(StrictInt, minimum=0) | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    priority: StrictInt | None = None
    cache_salt: Name | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions. OpenAI's fields, then those vLLM adds. null means: as if not given."""

    prompt: Prompts
    logprobs: within(StrictInt, minimum=0, maximum=MAX_COMPLETION_LOGPROBS) | None = None
    echo: StrictBool | None = None
    best_of: within(StrictInt, minimum=1, maximum=MAX_CHOICES) | None = None
    suffix: within(StrictStr, maxLength=0) | None = None
    prompt_logprobs: within(StrictInt, minimum=0, maximum=MAX_LOGPROBS) | None = None

    def prompts(self) -> list[Prompt]:
        """One prompt or several, each text or token ids. Raises RequestError: none, or too many choices."""
        if not self.prompt:
            # OpenAI begins a new document here. How one begins is the model's business: its user knows.
            raise RequestError(400, "prompt is empty: at least one token is needed", param="prompt")
        one = _kind(self.prompt) in ("text", "ids")
        prompts = [self.prompt] if one else list(self.prompt)
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            message = f"n={self.n} for each of {len(prompts)} prompts is more than {MAX_CHOICES} choices"
            raise RequestError(400, message, param="n")
        return prompts

    def sampling_params(self, default_max_tokens: int | None = DEFAULT_MAX_TOKENS) -> SamplingParams:
        """Raises ParameterError or RequestError for a value out of range or a field we do not have."""
        if self.suffix:  # "" asks for nothing
            raise RequestError(
                400, "suffix is not supported: the models here only continue text", param="suffix"
            )
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                400, f"best_of={self.best_of} is not supported, only best_of = n", param="best_of"
            )
        if self.stream_options and not self.stream:
            raise RequestError(400, "stream_options needs stream=true", param="stream_options")
        if self.stream_options and self.stream_options.include_obfuscation:
            message = "stream_options.include_obfuscation=true is not supported: chunks are not padded here"
            raise RequestError(400, message, param="stream_options")
        given = {
            name: getattr(self, name) for name in SamplingParams.__dataclass_fields__ if name != "logit_bias"
        }
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"max_tokens": default_max_tokens} | given, logit_bias=self._bias())

    def _bias(self) -> dict[int, float] | None:
        """JSON's keys are strings; token ids are numbers, written plainly."""
        for key in self.logit_bias or ():
            if not re.fullmatch(TOKEN_ID, key):
                raise ParameterError("logit_bias", f"logit_bias has key {key!r}: keys must be token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()} if self.logit_bias else None


class Completions:
    """What a body asks of the engine, and how outputs are shown to its client. A subclass can do more: log
    probabilities and the prompt's echo come that way (Part 10).
    """

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, allow_priority: bool = False) -> None:
        """`allow_priority`: clients may choose their own."""
        self.allow_priority = allow_priority

    def params(self, body: CompletionRequest) -> SamplingParams:
        """Raises ParameterError or RequestError for a value out of range or a field we do not have."""
        if body.echo:
            message = "echo=true is not supported here: Part 10 (logprobs) brings it"
            raise RequestError(400, message, param="echo")
        return body.sampling_params()

    def options(self, body: CompletionRequest) -> dict[str, Any]:
        """What the engine takes beside prompt and parameters: of these, what was given."""
        if body.priority and not self.allow_priority:
            message = f"priority={body.priority} is not supported: the operator has not allowed priorities"
            raise RequestError(400, message, param="priority")
        if abs(body.priority or 0) > MAX_PRIORITY:
            message = f"priority={body.priority}: accepted are -{MAX_PRIORITY} to {MAX_PRIORITY}"
            raise RequestError(400, message, param="priority")
        given = {"priority": body.priority, "cache_salt": body.cache_salt}
        return {name: value for name, value in given.items() if value is not None}

    def opening(self, body: CompletionRequest) -> list[dict]:
        """Choices that a stream shows before there is anything to show."""
        return []

    def choice(
        self,
        body: CompletionRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        shown: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice, but for its index: what `sample`, one of `output`'s, has beyond what the client
        was shown of it last.
        """
        text = sample.text[len(shown.text) if shown else 0 :]
        return {"text": text, "logprobs": None, "finish_reason": sample.finish_reason}

    def usage(self, body: CompletionRequest, outputs: Sequence[RequestOutput]) -> dict:
        """Tokens of all prompts and of all their completions."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
