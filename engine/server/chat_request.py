"""The fields of OpenAI's chat API, and how they become a conversation and parameters of the engine. Part 14.

Every field has its effect or is refused by name, except names for the client's own records. The models have
no images or audio. OpenAI's fields for those accept only values that ask for nothing, because clients send
such values by habit. The shapes of tools are in chat_tools.py: their values are refused unless Extension B is
here.
Shapes: https://platform.openai.com/docs/api-reference/chat
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.decoding.params import MAX_LOGPROBS, SamplingParams
from engine.server.chat_tools import CallId, ToolCalls, ToolChoice, Tools, short_json
from engine.server.errors import RequestError
from engine.server.field_types import Integer, Name, bounds, tag_by_type
from engine.server.fields import Fields
from engine.server.limits import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_TEMPLATE_KWARGS_CHARACTERS,
    MAX_TEXT_PARTS,
)
from engine.server.neutral import neutral
from engine.server.protocol import SamplingFields, check_num_logprobs
from engine.server.structured_fields import structure_of_rest

# Fields that the server does not have, with the values that ask for nothing.
NullOrEmpty = Annotated[None, neutral([], otherwise="is not supported: null is accepted")]
NoFunctions = Annotated[None, neutral([], otherwise="is the old name of tools: null or [] is accepted")]
NoCallOfMessage = Annotated[
    None, neutral([], otherwise="is the old name of tool_calls: null or [] is accepted")
]
NoFunctionCall = Annotated[
    None,
    neutral("none", "auto", otherwise='is the old name of tool_choice: null, "none" or "auto" is accepted'),
]
ServiceTier = Annotated[
    None, neutral("auto", "default", otherwise='is not supported: null, "auto" or "default" is accepted')
]
Store = Annotated[
    None, neutral(False, otherwise="is not supported, since answers are not kept: null or false is accepted")
]
Verbosity = Annotated[None, neutral("medium", otherwise='is not supported: null or "medium" is accepted')]
content_kind = tag_by_type({str: "text", list: "parts"})  # of the types that a message's content may have


def _not_function(value: Any) -> Any:
    """Return a role unchanged. Raises PydanticCustomError for "function", the old name of the role "tool"."""
    if value == "function":
        message = "a message of role 'function' is not supported: 'tool' is its newer name"
        raise PydanticCustomError("not_supported", message)
    return value


def _none_if_empty(value: Any) -> Any:
    """None for [], which some clients send for a message without calls or thoughts. Other values are
    unchanged.
    """
    return None if value == [] else value


Role = Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_not_function)]


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: StrictStr


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True)]
Content = Annotated[
    Annotated[StrictStr, Tag("text")] | Annotated[TextParts, Tag("parts")],
    Discriminator(content_kind, "content_kind", "a text or a list of text parts is accepted"),
]


class Message(Fields):
    """One message of a conversation.

    Several text parts are joined by line breaks. The role `developer` is another name for `system`. Only an
    assistant's message may have no content, which counts as an empty text. `name` is for the chat template.
    An assistant's message may have `tool_calls` and thoughts, and each call is answered by a message of role
    `tool` with the call's id: both come with Extension B. The fields from `refusal` on exist so that a client
    can send an answer's message back; they must be empty.
    """

    role: Role
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[ToolCalls | None, BeforeValidator(_none_if_empty)] = None
    tool_call_id: CallId | None = None
    reasoning: Annotated[StrictStr | None, BeforeValidator(_none_if_empty)] = None
    reasoning_content: Annotated[StrictStr | None, BeforeValidator(_none_if_empty)] = None  # its older name
    refusal: NullOrEmpty = None
    annotations: NullOrEmpty = None
    audio: NullOrEmpty = None
    function_call: NoCallOfMessage = None

    @model_validator(mode="after")
    def _fields_fit_role(self) -> Self:
        """Raises PydanticCustomError for a field that is missing, or that the role does not have."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", f"a message of role {self.role} needs a content")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("wrong_role", f"a message of role {self.role} has no tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            message = "a message of role tool needs a tool_call_id, and no other message has one"
            raise PydanticCustomError("wrong_role", message)
        return self

    def plain(self) -> dict[str, str]:
        """{"role": str, "content": str} and, if given, "name": str, as a chat template reads them. The role
        `developer` becomes `system`. Tool calls and thoughts are left out.
        """
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        return message if self.name is None else message | {"name": self.name}


MetadataValue = Annotated[StrictStr, Field(max_length=MAX_METADATA_CHARACTERS)]
MetadataKey = Annotated[StrictStr, Field(max_length=MAX_NAME_CHARACTERS)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)]
TemplateKwargs = Annotated[dict[StrictStr, Any], short_json(MAX_TEMPLATE_KWARGS_CHARACTERS)]


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions. A field that is null counts as not given."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[Integer, bounds(minimum=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Integer, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    reasoning_effort: Name | None = None  # a variable of the template, if the template reads it

    # Names of the client's own, for its provider's records: nothing is done with them here.
    metadata: Metadata | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None  # prompts share a cache here without it

    # What the model may call, whether it must, and whether it may call several at once (Extension B).
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None

    # OpenAI's fields that this server does not have: only values that ask for nothing are accepted.
    functions: NoFunctions = None
    function_call: NoFunctionCall = None
    store: Store = None
    service_tier: ServiceTier = None
    modalities: Annotated[
        None, neutral(["text"], otherwise='is not supported: null or ["text"] is accepted')
    ] = None
    audio: NullOrEmpty = None
    prediction: NullOrEmpty = None
    verbosity: Verbosity = None
    web_search_options: NullOrEmpty = None

    # vLLM's fields, which OpenAI does not have.
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    echo: StrictBool | None = None
    include_reasoning: StrictBool | None = None  # false: thoughts are left out of the answer (Extension B)
    prompt_logprobs: Annotated[Integer, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    chat_template: Annotated[
        None, neutral(otherwise="is not accepted from a client, since a template is a program: null is")
    ] = None

    _readers: dict[int, Any] = PrivateAttr(default_factory=dict)

    @property
    def readers(self) -> dict[int, Any]:
        """What a ChatExtension has read so far of a streamed answer, by the indices of its samples. The body
        keeps it, because the body lives as long as the answer.
        """
        return self._readers

    def role(self) -> str:
        """The role of the message that the model writes: the assistant's, or with `add_generation_prompt`
        false, when the prompt ends in the last message, that message's.
        """
        return self.messages[-1].role if self.add_generation_prompt is False else "assistant"

    def echoed(self) -> str:
        """With `echo`, the last message's content if the model goes on in that message's role; else ""."""
        last = self.messages[-1]
        if self.echo and last.role == self.role():
            return last.plain()["content"]
        return ""

    def sampling_params(self) -> SamplingParams:
        """As in SamplingFields. `max_tokens` is the old name of `max_completion_tokens`.

        If neither is given, only the model's length limits the answer. Also raises RequestError if both are
        given and differ; if `max_completion_tokens`, `top_logprobs` or `prompt_logprobs` is out of range; if
        `top_logprobs` is given without `logprobs`; and if `prompt_logprobs` is given with `stream`.
        """
        self._check_length()
        self._check_logprobs()
        return super().sampling_params()

    def _check_length(self) -> None:
        """Raise RequestError for `max_completion_tokens` below 1, or other than `max_tokens`."""
        value = self.max_completion_tokens
        if value is None:
            return
        if self.max_tokens not in (None, value):
            message = (
                f"max_tokens={self.max_tokens} contradicts max_completion_tokens={value}: the one is the "
                "other's old name"
            )
            raise RequestError(400, message, param="max_completion_tokens")
        if value < 1:
            message = f"max_completion_tokens={value}: a whole number of at least 1 is accepted"
            raise RequestError(400, message, param="max_completion_tokens")

    def _check_logprobs(self) -> None:
        """Raise RequestError for `top_logprobs` and `prompt_logprobs` that are refused."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        check_num_logprobs("top_logprobs", self.top_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs needs stream=false: the chunks of a chat have no place for them"
            raise RequestError(400, message, param="prompt_logprobs")

    def output_bound(self) -> tuple[str, int | None]:
        """As in SamplingFields: `max_completion_tokens`, if it is given."""
        if self.max_completion_tokens is None:
            return super().output_bound()
        return "max_completion_tokens", self.max_completion_tokens

    def _sent_params(self) -> dict[str, Any]:
        params = super()._sent_params()
        _, max_tokens = self.output_bound()
        params["max_tokens"] = max_tokens
        params["logprobs"] = None
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        params["prompt_logprobs"] = self.prompt_logprobs
        structure = params["structured_outputs"]
        if self.continue_final_message and structure is not None:
            # The constraint covers the beginning that the client sent, too.
            content = self.messages[-1].plain()["content"]
            params["structured_outputs"] = structure_of_rest(structure, content)
        return params
