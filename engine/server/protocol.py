"""OpenAI's completions API: its fields, the parameters they become, and the JSON of outputs. Part 4.

Promises that an accepted value has its effect, or asks for nothing; only `user` is for the client's own
records. A field that is unknown, or that the engine does not support, is refused by name.
Shapes: https://platform.openai.com/docs/api-reference/completions
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

from pydantic import StrictBool, StrictStr

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import MAX_LOGPROBS, ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.decoding.recommended import with_recommended
from engine.server.errors import RequestError
from engine.server.field_types import (
    TOKEN_ID,
    BadWords,
    Biases,
    Integer,
    Name,
    Number,
    Prompts,
    RequestName,
    Salt,
    StopOrStops,
    StopTokenIds,
    TokenIds,
    bounds,
)
from engine.server.fields import Fields
from engine.server.limits import MAX_CHOICES, MAX_PRIORITY
from engine.server.neutral import neutral
from engine.server.structured_fields import ResponseFormat, StructuredOutputs, structure_of


class StreamOptions(Fields):
    """What a stream has beside its text. Only a body with `stream` may have these options."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None  # vLLM's: the usage so far in each chunk
    include_obfuscation: Annotated[StrictBool, bounds(const=False)] | None = None


class SamplingFields(Fields):
    """The fields of both completions and chats (Part 14). A field that is null counts as not given."""

    model: Name | None = None  # the base model or an adapter (Part 18); null: the base model
    max_tokens: Annotated[Integer, bounds(minimum=0)] | None = None
    temperature: Annotated[Number, bounds(minimum=0, maximum=1000)] | None = None
    top_p: Annotated[Number, bounds(exclusiveMinimum=0, maximum=1)] | None = None
    n: Annotated[Integer, bounds(minimum=1, maximum=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: StopOrStops | None = None
    presence_penalty: Annotated[Number, bounds(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[Number, bounds(minimum=-2, maximum=2)] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[Integer, bounds(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    user: Name | None = None
    response_format: ResponseFormat | None = None

    # vLLM's fields, which OpenAI does not have.
    top_k: Annotated[Integer, bounds(minimum=-1)] | None = None
    min_p: Annotated[Number, bounds(minimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[Number, bounds(minimum=0.01, maximum=100)] | None = None
    min_tokens: Annotated[Integer, bounds(minimum=0)] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: TokenIds | None = None
    # "not" is a word of Python, so it cannot be written as a keyword argument.
    truncate_prompt_tokens: Annotated[Integer, bounds(minimum=-1, **{"not": {"const": 0}})] | None = None
    priority: Integer | None = None
    cache_salt: Salt | None = None
    request_id: RequestName | None = None  # the answer's id, unless the header X-Request-Id names one
    return_token_ids: StrictBool | None = None  # of the prompt and of each choice
    return_tokens_as_token_ids: StrictBool | None = None  # in log probabilities: "token_id:5" for a text
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: Annotated[
        None,
        neutral(
            False,
            otherwise="is not supported: beam search takes a whole engine, and a server has many users; "
            "LLM.beam_search of Extension B does it offline. Null or false is accepted",
        ),
    ] = None

    def sampling_params(self) -> SamplingParams:
        """The parameters for the engine.

        Raises ParameterError or RequestError for a value that is out of range or not supported.
        """
        self._check_stream_options()
        return SamplingParams(**self._sent_params())

    def _check_stream_options(self) -> None:
        """Raise RequestError for stream options that are not supported, or that need another field."""
        options = self.stream_options
        if options is None:
            return
        message: str | None = None
        if not self.stream:
            message = "stream_options needs stream=true"
        elif options.include_obfuscation:
            message = "stream_options.include_obfuscation=true is not supported: chunks are not padded here"
        elif options.continuous_usage_stats and not options.include_usage:
            message = "stream_options.continuous_usage_stats=true needs include_usage=true"
        if message is not None:
            raise RequestError(400, message, param="stream_options")

    def output_bound(self) -> tuple[str, int | None]:
        """The name and the value of the field that bounds the output's length."""
        return "max_tokens", self.max_tokens

    def _sent_params(self) -> dict[str, Any]:
        """The arguments of SamplingParams. One that the body does not give is left out, or is None.

        Raises ParameterError or RequestError if `logit_bias` or the description of the output is wrong.
        """
        params: dict[str, Any] = {}
        for param in dataclasses.fields(SamplingParams):
            if param.name in SamplingFields.model_fields:
                value = getattr(self, param.name)
                if value is not None:
                    params[param.name] = value
        # These two parameters have other types than the fields of the same names.
        params["logit_bias"] = self._bias()
        params["structured_outputs"] = structure_of(self.response_format, self.structured_outputs)
        return params

    def _bias(self) -> dict[int, float] | None:
        """`logit_bias` with token ids as keys, which are strings in JSON; None if no bias is given.

        Raises ParameterError if a key is not a token id.
        """
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not re.fullmatch(TOKEN_ID, key):
                raise ParameterError("logit_bias", f"logit_bias has key {key!r}: keys must be token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions: OpenAI's fields, then vLLM's `prompt_logprobs`. null: not given."""

    prompt: Prompts
    logprobs: Annotated[Integer, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    best_of: Annotated[Integer, bounds(minimum=1, maximum=MAX_CHOICES)] | None = None
    suffix: Annotated[StrictStr, bounds(maxLength=0)] | None = None
    prompt_logprobs: Annotated[Integer, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or a list of token ids.

        Raises RequestError if there is no prompt, or if prompts × n is more than MAX_CHOICES.
        """
        if not self.prompt:
            # For an empty prompt, OpenAI starts a new document. The token that starts one depends on the
            # model, so the client must send that token.
            raise RequestError(400, "prompt is empty: at least one token is needed", param="prompt")
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)  # a text, or token ids
        prompts: list[Any] = [self.prompt] if is_single else list(self.prompt)
        n = self.n or 1
        if len(prompts) * n > MAX_CHOICES:
            message = f"n={n} for each of {len(prompts)} prompts is more than {MAX_CHOICES} choices"
            raise RequestError(400, message, param="n")
        return prompts

    def sampling_params(self) -> SamplingParams:
        """As in SamplingFields. Also raises RequestError for `echo`, `suffix` and `best_of` other than n."""
        if self.echo:
            message = "echo=true is not supported by this server"
            raise RequestError(400, message, param="echo")
        if self.suffix:  # an empty suffix has no effect
            message = "suffix is not supported: the models here only continue text"
            raise RequestError(400, message, param="suffix")
        if self.best_of not in (None, self.n or 1):
            message = f"best_of={self.best_of} is not supported, only best_of = n"
            raise RequestError(400, message, param="best_of")
        return super().sampling_params()

    def _sent_params(self) -> dict[str, Any]:
        return super()._sent_params() | {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}


def check_num_logprobs(field: str, value: int | None) -> None:
    """Raise RequestError if `value` is given and is not in 0 to MAX_LOGPROBS. `field` is the field's name."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        message = f"{field}={value}: a whole number from 0 to {MAX_LOGPROBS} is accepted"
        raise RequestError(400, message, param=field)


Body = TypeVar("Body", bound=SamplingFields)


class Completions(Generic[Body]):
    """Turns a body into parameters and options for the engine, and outputs into the JSON of an answer.

    Subclasses add log probabilities and the prompt's echo (Part 10), and chats (Part 14).
    """

    id_prefix = "cmpl"  # of an answer's `id`
    object = "text_completion"  # the field `object` of a whole answer
    chunk_object = "text_completion"  # the field `object` of a stream's chunks
    prompt_ids_in_choice = True  # whether `prompt_token_ids` stand in a choice; in a chat, beside the choices

    def __init__(self, allow_priority: bool = False) -> None:
        """`allow_priority`: whether a client may set the priority of its requests."""
        self.allow_priority = allow_priority
        # `ruvon serve` sets these four.
        self.max_model_len: int | None = None  # the most tokens of prompt and output together; None: no bound
        self.recommended: Mapping[str, Any] = {}  # the parameters of generation_config.json
        # OpenAI's `system_fingerprint`, if answers have one. If it has changed, the same request with the
        # same seed may get another answer.
        self.fingerprint: str | None = None
        self.name_of_alias: Mapping[str, str] = {}  # alias of the model -> the name that answers have
        # Functions of later parts, whose results are added to `options` (the adapter's name, Part 18) and to
        # `usage` (the cost of the outputs, Part 19).
        self.more_options: list[Callable[[SamplingFields], dict[str, Any]]] = []
        self.more_usage: list[Callable[[Sequence[RequestOutput]], dict[str, Any]]] = []

    def params(self, body: Body) -> SamplingParams:
        """The parameters for the engine, with `recommended` in place of those that the body leaves out.

        Raises ParameterError or RequestError for a wrong value.
        """
        params = body.sampling_params()
        name, bound = body.output_bound()
        if bound is not None and self.max_model_len is not None and bound > self.max_model_len:
            message = f"{name}={bound} is more than max_model_len={self.max_model_len}, prompt and output"
            raise RequestError(400, message, param=name)
        sent_names = [name for name in self.recommended if getattr(body, name) is not None]
        return with_recommended(params, sent_names, self.recommended)

    def options(self, body: Body) -> dict[str, Any]:
        """The keyword arguments of `Backend.generate` that the body gives: priority, cache_salt, adapter.

        Raises RequestError if the priority is out of range, or is not 0 and clients may not set it.
        """
        if body.priority and not self.allow_priority:
            message = f"priority={body.priority} is not supported: the operator has not allowed priorities"
            raise RequestError(400, message, param="priority")
        if abs(body.priority or 0) > MAX_PRIORITY:
            message = f"priority={body.priority}: accepted are -{MAX_PRIORITY} to {MAX_PRIORITY}"
            raise RequestError(400, message, param="priority")
        fields = {"priority": body.priority, "cache_salt": body.cache_salt}
        options = {name: value for name, value in fields.items() if value is not None}
        for options_of in self.more_options:
            options |= options_of(body)
        return options

    def opening(self, body: Body) -> list[dict]:
        """The choices that a stream sends before the first token. There are none for completions."""
        return []

    def answer_fields(self, body: Body, outputs: Sequence[RequestOutput]) -> dict:
        """Fields of a whole answer beside the envelope, choices and usage. There are none for completions."""
        return {}

    def choice(
        self,
        body: Body,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice without its index, with the text that `sample` has beyond `previous`.

        `sample` is one of `output.outputs`. `previous` is the same sample as it was last sent to the client;
        None if nothing was sent.
        """
        num_sent = len(previous.text) if previous else 0  # characters
        return {"text": sample.text[num_sent:], "logprobs": None, "finish_reason": sample.finish_reason}

    def vllm_fields(
        self, body: Body, output: RequestOutput, sample: CompletionOutput, previous: CompletionOutput | None
    ) -> dict:
        """vLLM's fields of a choice. The arguments are those of `choice`.

        If the body asks for token ids, the fields are more than `stop_reason`: the `token_ids` beyond
        `previous`, and, if nothing was sent before, the `prompt_token_ids` (`prompt_ids_in_choice`).
        """
        fields: dict[str, Any] = {"stop_reason": sample.stop_reason}
        if body.return_token_ids:
            num_sent = len(previous.token_ids) if previous else 0
            fields["token_ids"] = list(sample.token_ids[num_sent:])
            if self.prompt_ids_in_choice and previous is None:
                fields["prompt_token_ids"] = list(output.prompt_token_ids)
        return fields

    def usage(self, body: Body, outputs: Sequence[RequestOutput]) -> dict:
        """The numbers of tokens in all prompts and all completions of an answer, in OpenAI's shape."""
        num_prompt_tokens, num_output_tokens = 0, 0
        for output in outputs:
            num_prompt_tokens += len(output.prompt_token_ids)
            num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }
        cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        for usage_of in self.more_usage:
            usage |= usage_of(outputs)
        return usage
