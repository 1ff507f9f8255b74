"""The fields of OpenAI's chat API for tools, and the seam through which they get their effect. Part 14.

Part 14 accepts the fields' shapes and refuses their values by name. A `ChatExtension`, which Extension B
hands in, gives them their effect: it turns tools into parameters and a prompt, and finds calls and thoughts
in the answer. Shapes: https://platform.openai.com/docs/api-reference/chat
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, StrictStr, Tag
from pydantic_core import PydanticCustomError

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import SamplingParams
from engine.server.errors import RequestError
from engine.server.field_types import Name, tag_by_type
from engine.server.fields import Fields
from engine.server.limits import (
    MAX_CALLS,
    MAX_JSON_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_TOOL_CHARACTERS,
    MAX_TOOLS,
    TOOL_NAME,
)
from engine.server.neutral import EXTENSION_B

if TYPE_CHECKING:
    from engine.server.chat_request import ChatRequest, Message


def short_json(limit: int, max_depth: int | None = None) -> BeforeValidator:
    """For Annotated: a value of at most `limit` characters as JSON, nested at most `max_depth` levels deep
    (None: any number), and without lone surrogates. Another value raises PydanticCustomError.
    """

    def check(value: Any) -> Any:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except RecursionError:
            raise PydanticCustomError("too_deep", "JSON is nested too deeply") from None
        if len(text) > limit:
            raise PydanticCustomError("too_long", f"at most {limit} characters of JSON are accepted")
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "a text has a lone surrogate, which is not a character"
            raise PydanticCustomError("surrogate", message) from None
        if max_depth is not None and depth_of(value) > max_depth:
            raise PydanticCustomError("too_deep", f"at most {max_depth} levels of nesting are accepted")
        return value

    return BeforeValidator(check)


def depth_of(value: Any) -> int:
    """How many levels of objects and lists JSON data have: 0 for a text, 1 for []."""
    depth = 0
    level = [value]  # all values at this depth
    while any(isinstance(inner, dict | list) for inner in level):
        next_level: list[Any] = []
        for inner in level:
            if isinstance(inner, dict):
                next_level += inner.values()
            elif isinstance(inner, list):
                next_level += inner
        level = next_level
        depth += 1
    return depth


ToolName = Annotated[StrictStr, Field(pattern=TOOL_NAME)]
Schema = Annotated[dict[StrictStr, Any], short_json(MAX_TOOL_CHARACTERS, MAX_JSON_DEPTH)]


class Function(Fields):
    """A function that the model may call. `parameters` is a JSON schema of its arguments, if it has any."""

    name: ToolName
    description: Annotated[StrictStr, Field(max_length=MAX_TOOL_CHARACTERS)] | None = None
    parameters: Schema | None = None
    strict: StrictBool | None = None


class Tool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a function in `tools`."""

    name: ToolName


class NamedTool(Fields):
    """The value of `tool_choice` that asks for a call of this function."""

    type: Literal["function"]
    function: NamedFunction


ChoiceWord = Literal["none", "auto", "required"]
_choice_kind = tag_by_type({str: "word", dict: "function", NamedTool: "function"})
ToolChoice = Annotated[
    Annotated[ChoiceWord, Tag("word")] | Annotated[NamedTool, Tag("function")],
    Discriminator(_choice_kind, "tool_choice_kind", '"none", "auto", "required" or a function is accepted'),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class CalledFunction(Fields):
    """A function's name and its arguments, which are JSON in a text."""

    name: ToolName
    arguments: StrictStr


class ToolCall(Fields):
    """A call in an assistant's message. The client sends it back as it stood in an answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
CallId = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class AnswerItems(Protocol):
    """One answer, with one sample, as the items of a response (/v1/responses)."""

    def opening(self) -> list[dict[str, Any]]:
        """The events that a stream sends before the first token."""

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """OpenAI's events for what `sample` has beyond `previous`, and for the end if it has finished.

        `previous` is the same sample as it was last sent to the client; None if nothing was sent.
        """

    def output(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The items of a whole answer. In a stream, call it after the `events` of the same sample."""

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """How many tokens of a whole answer are thoughts, the marks around them included. Call it after
        `output`.
        """


class ChatExtension(Protocol):
    """Gives tools and thoughts their effect in a chat (Extension B)."""

    def params(self, body: "ChatRequest", params: SamplingParams) -> SamplingParams:
        """The parameters for the engine. Raises RequestError for fields of `body` that are refused."""

    def messages(self, messages: Sequence["Message"], template: ChatTemplate) -> Sequence[Mapping[str, Any]]:
        """The messages as the template reads them. Raises RequestError for a call whose arguments are not a
        JSON object.
        """

    async def check(self, body: "ChatRequest") -> None:
        """Raise RequestError for a schema that a required call cannot obey, and NoRoomError if too many
        schemas wait for this check.
        """

    def tools(self, body: "ChatRequest") -> list[dict[str, Any]] | None:
        """The tools as the template reads them."""

    def choice_fields(
        self,
        body: "ChatRequest",
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict[str, Any]:
        """The fields that replace those of `Chat.choice`: the message or delta, and the finish_reason. {} if
        nothing changes. The arguments are those of `Chat.choice`.
        """

    def items(self, body: "ChatRequest", prompt_token_ids: Sequence[int]) -> AnswerItems | None:
        """An object that turns the answer to this prompt into items; None if the answer is one message.
        Raises RequestError for fields of `body` that have no place in items.
        """


def refuse_tools(body: "ChatRequest") -> None:
    """Raise RequestError for a value of `body`, or of one of its messages, that has an effect only with a
    ChatExtension.
    """
    if body.tools:
        raise RequestError(400, f"tools {EXTENSION_B}: null or [] is accepted", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        message = f'tool_choice {EXTENSION_B}: null, "none" or "auto" is accepted'
        raise RequestError(400, message, param="tool_choice")
    if body.include_reasoning is False:
        message = f"include_reasoning=false {EXTENSION_B}: null or true is accepted"
        raise RequestError(400, message, param="include_reasoning")
    refuse_extension_turns(body.messages)


def refuse_extension_turns(messages: Sequence["Message"]) -> None:
    """Raise RequestError for a message that has a place in a prompt only with a ChatExtension."""
    for i, message in enumerate(messages):
        for name in ("tool_calls", "tool_call_id", "reasoning", "reasoning_content"):
            if getattr(message, name):
                raise RequestError(400, f"messages[{i}].{name} {EXTENSION_B}", param="messages")
        if message.role == "tool":
            reason = f"messages[{i}]: a message of role 'tool' {EXTENSION_B}"
            raise RequestError(400, reason, param="messages")
