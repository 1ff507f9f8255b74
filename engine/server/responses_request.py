"""The fields of OpenAI's Responses API, and how they become a chat. Part 20.

Every field has its effect or is refused by name, as in chat_request.py. Nothing is stored, so a conversation
is sent whole with each request. Shapes: https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from engine.decoding.params import MAX_LOGPROBS
from engine.server.chat_request import (
    ChatRequest,
    Message,
    Metadata,
    NullOrEmpty,
    ServiceTier,
    Store,
    TemplateKwargs,
    Verbosity,
)
from engine.server.chat_tools import (
    ChoiceWord,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
)
from engine.server.errors import RequestError
from engine.server.field_types import Integer, Name, Number, Salt, StopOrStops, bounds, tag_by_type
from engine.server.fields import Fields
from engine.server.limits import MAX_TOOLS
from engine.server.neutral import neutral
from engine.server.responses_input import Items, chat_messages
from engine.server.structured_fields import JsonSchema, ResponseFormat, SchemaName

Includable = Literal["message.output_text.logprobs"]
(LOGPROBS,) = get_args(Includable)  # the value of `include` that asks for log probabilities
# Fields with the same name and meaning as in a ChatRequest.
SAME_FIELDS = (
    "temperature", "top_p", "stream", "metadata", "user", "safety_identifier", "prompt_cache_key", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos",
    "priority", "cache_salt", "chat_template_kwargs",
)  # fmt: skip
# A field of a ChatRequest -> the field of this API from which it comes.
RESPONSES_NAMES = {
    "messages": "input", "logprobs": "include", "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning", "response_format": "text",
}  # fmt: skip

_input_kind = tag_by_type({str: "text", list: "items"})
_choice_kind = tag_by_type({str: "word", dict: "function"})


class ResponseTool(Function):
    """A function that the model may call. Its fields stand beside `type`, and not in an object of their own
    as in a chat.
    """

    type: Literal["function"]

    def chat_tool(self) -> Tool:
        """The same tool as it stands in a chat."""
        function_fields = self.model_dump(exclude_unset=True, exclude={"type"})
        return Tool(type="function", function=Function(**function_fields))


class NamedResponseTool(Fields):
    """The value of `tool_choice` that asks for a call of this function."""

    type: Literal["function"]
    name: ToolName


class TextFormat(Fields):
    """A chat's `response_format`, with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None

    def response_format(self) -> ResponseFormat:
        """The format as a chat has it. Raises RequestError if a field is missing or has no use."""
        fields = {
            "name": self.name,
            "description": self.description,
            "schema": self.schema_,
            "strict": self.strict,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        if self.type != "json_schema":
            if given:
                first = next(iter(given))
                message = f'text.format.{first} needs type "json_schema"'
                raise RequestError(400, message, param="text")
            return ResponseFormat(type=self.type)
        for name in ("name", "schema"):
            if name not in given:
                message = f'text.format.{name} is required with type "json_schema"'
                raise RequestError(400, message, param="text")
        return ResponseFormat(type=self.type, json_schema=JsonSchema.model_validate(given))


class TextConfig(Fields):
    """What the answer's text must be like."""

    format: TextFormat | None = None
    verbosity: Verbosity = None


class ReasoningConfig(Fields):
    """How much the model is to think, if its chat template reads `reasoning_effort`."""

    effort: Name | None = None
    summary: NullOrEmpty = None
    generate_summary: NullOrEmpty = None


class ResponsesRequest(Fields):
    """The body of POST /v1/responses. A field that is null counts as not given."""

    model: Name | None = None
    input: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[Items, Tag("items")],
        Discriminator(_input_kind, "input_kind", "a text or a list of messages is accepted"),
    ]
    instructions: StrictStr | None = None  # the system message, before all others
    max_output_tokens: Annotated[Integer, bounds(minimum=1)] | None = None
    temperature: Annotated[Number, bounds(minimum=0, maximum=1000)] | None = None
    top_p: Annotated[Number, bounds(exclusiveMinimum=0, maximum=1)] | None = None
    stream: StrictBool | None = None
    include: Annotated[list[Includable], Field(max_length=1)] | None = None
    top_logprobs: Annotated[Integer, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None

    # What the model may call, as in a chat (Extension B).
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[ChoiceWord, Tag("word")] | Annotated[NamedResponseTool, Tag("function")],
            Discriminator(
                _choice_kind, "tool_choice_kind", '"none", "auto", "required" or a function is accepted'
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: StrictBool | None = None

    # Names of the client's own. They are in the answer, and nothing else is done with them.
    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    # OpenAI's fields that this server does not have: only values that ask for nothing are accepted.
    store: Store = None
    previous_response_id: Annotated[
        None,
        neutral(otherwise="names an answer, and none is kept: send the whole conversation as input"),
    ] = None
    conversation: NullOrEmpty = None
    background: Annotated[None, neutral(False, otherwise="is not supported: null or false is accepted")] = (
        None
    )
    truncation: Annotated[
        None, neutral("disabled", otherwise='is not supported: null or "disabled" is accepted')
    ] = None
    stream_options: Annotated[
        None,
        neutral({}, {"include_obfuscation": False}, otherwise="is not supported: events are not padded here"),
    ] = None
    max_tool_calls: NullOrEmpty = None
    prompt: NullOrEmpty = None
    service_tier: ServiceTier = None

    # vLLM's fields, which OpenAI does not have here.
    presence_penalty: Annotated[Number, bounds(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[Number, bounds(minimum=-2, maximum=2)] | None = None
    repetition_penalty: Annotated[Number, bounds(minimum=0.01, maximum=100)] | None = None
    top_k: Annotated[Integer, bounds(minimum=-1)] | None = None
    min_p: Annotated[Number, bounds(minimum=0, maximum=1)] | None = None
    seed: Annotated[Integer, bounds(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    stop: StopOrStops | None = None
    ignore_eos: StrictBool | None = None
    priority: Integer | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    def chat(self, model: str) -> ChatRequest:
        """The same request to `model` as a chat. Raises RequestError for fields that contradict each other,
        and for an input without a message or with too many calls.
        """
        if self.top_logprobs and not self.include:
            message = f'top_logprobs needs include=["{LOGPROBS}"]'
            raise RequestError(400, message, param="top_logprobs")
        text_format = self.text.format if self.text else None
        return ChatRequest(
            model=model,
            messages=self._chat_messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.include),
            top_logprobs=self.top_logprobs if self.include else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            tools=[tool.chat_tool() for tool in self.tools] if self.tools else None,
            tool_choice=self._chat_tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=text_format.response_format() if text_format else None,
            **{name: getattr(self, name) for name in SAME_FIELDS},
        )

    def _chat_messages(self) -> list[Message]:
        """`instructions` and `input` as messages of a chat. Raises RequestError if there is no message, or if
        there are too many calls.
        """
        messages: list[Message] = []
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += chat_messages(self.input)
        if not messages:
            raise RequestError(400, "input has no message", param="input")
        return messages

    def _chat_tool_choice(self) -> ToolChoice | None:
        """`tool_choice` as it stands in a chat."""
        if isinstance(self.tool_choice, NamedResponseTool):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice


def with_responses_names(error: RequestError) -> RequestError:
    """An error about a chat, in which the chat's field has its name in this API. Other errors are returned
    unchanged.
    """
    if error.param == "tools":  # a function's fields stand beside its type here
        name = "tools"
        message = error.message.replace(".function.", ".", 1)
    elif error.param in RESPONSES_NAMES:
        name = RESPONSES_NAMES[error.param]
        message = error.message.replace(error.param, name, 1)
    else:
        return error
    return RequestError(error.status, message, param=name, code=error.code, headers=error.headers)
