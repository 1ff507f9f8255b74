"""The fields of OpenAI's chat API for tools, and the seam through which they get their effect. Part 14.

Part 14 accepts the fields' shapes and refuses their values by name: what tools mean, which calls an answer
has, and which of its text are thoughts is told by a `ChatExtension`, which Extension B hands in.
Shapes: https://platform.openai.com/docs/api-reference/chat
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
from engine.server.protocol import Name

if TYPE_CHECKING:
    from engine.server.chat_request import ChatRequest, Message


def short_json(limit: int, max_depth: int | None = None) -> BeforeValidator:
    """For Annotated: a value that takes at most `limit` characters as JSON, and is nested at most `max_depth`
    levels deep.
    """

    def check(value: Any) -> Any:
        try:
            is_short = len(json.dumps(value)) <= limit
            json.dumps(value, ensure_ascii=False).encode() if is_short else None
        except RecursionError:
            is_short = False
        except UnicodeEncodeError:
            message = "a text has a lone surrogate, which is not a character"
            raise PydanticCustomError("surrogate", message) from None
        if not is_short:
            raise PydanticCustomError("too_long", f"at most {limit} characters of JSON are accepted")
        if max_depth is not None and depth_of(value) > max_depth:
            raise PydanticCustomError("too_deep", f"at most {max_depth} levels of nesting are accepted")
        return value

    return BeforeValidator(check)


def depth_of(value: Any) -> int:
    """How many levels of objects and lists JSON data have: 0 for a text, 1 for []."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        level = [x for outer in level for x in (outer.values() if isinstance(outer, dict) else outer)]
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
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: ToolName


class NamedTool(Fields):
    """The value of `tool_choice` that asks for a call of this function."""

    type: Literal["function"]
    function: NamedFunction


def _choice_kind(value: Any) -> str | None:
    return "word" if isinstance(value, str) else "function" if isinstance(value, dict | NamedTool) else None


ChoiceWord = Literal["none", "auto", "required"]
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
    """A call in an assistant's message, as an answer had it."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
CallId = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class AnswerItems(Protocol):
    """An answer as the items of a response (/v1/responses)."""

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """OpenAI's events of what `sample` has beyond `previous`, and of the end if it has finished."""

    def output(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The items of a whole answer, which `events` may have told of or not."""

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """How many tokens of a whole answer are thoughts, with their marks."""


class ChatExtension(Protocol):
    """What tools and thoughts mean in a chat: Extension B."""

    def params(self, body: "ChatRequest", params: SamplingParams) -> SamplingParams:
        """The parameters for the engine. Raises RequestError for fields of `body` that are refused."""

    def messages(self, messages: Sequence["Message"], template: ChatTemplate) -> Sequence[Mapping[str, Any]]:
        """The messages as the template reads them. Raises RequestError for a call that is none."""

    async def check(self, body: "ChatRequest") -> None:
        """Raise RequestError for a schema that a required call cannot obey, and NoRoomError if too many wait
        for such an answer.
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
        """The fields of a choice that are other than without the extension: its message or delta, and its
        finish_reason. The arguments are those of `Chat.choice`.
        """

    def items(self, body: "ChatRequest", prompt_token_ids: Sequence[int]) -> AnswerItems | None:
        """What makes items of the answer; None if the answer is one message. Raises RequestError for fields
        of `body` that no item has a place for.
        """


def refuse_tools(body: "ChatRequest") -> None:
    """Raise RequestError for a value of `body` that only a ChatExtension gives an effect."""
    if body.tools:
        raise RequestError(400, f"tools {EXTENSION_B}: null or [] is accepted", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        message = f'tool_choice {EXTENSION_B}: null, "none" or "auto" is accepted'
        raise RequestError(400, message, param="tool_choice")
    if body.include_reasoning is False:
        message = f"include_reasoning=false {EXTENSION_B}: null or true is accepted"
        raise RequestError(400, message, param="include_reasoning")
    refuse_turns_of_tools(body.messages)


def refuse_turns_of_tools(messages: Sequence["Message"]) -> None:
    """Raise RequestError for a message that only a ChatExtension understands."""
    for i, message in enumerate(messages):
        for name in ("tool_calls", "tool_call_id", "reasoning", "reasoning_content"):
            if getattr(message, name):
                said = f"messages[{i}].{name} {EXTENSION_B}"
                raise RequestError(400, said, param="messages")
        if message.role == "tool":
            said = f"messages[{i}]: a message of role 'tool' {EXTENSION_B}"
            raise RequestError(400, said, param="messages")
