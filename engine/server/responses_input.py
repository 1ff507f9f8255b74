"""The items of a response's input, and how they become messages of a chat. Part 20.

A client sends the items of earlier answers back unchanged, with the results of its tools after the calls.
Shapes: https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictStr, Tag

from engine.server.chat_request import Message, NullOrEmpty, content_kind
from engine.server.chat_tools import CalledFunction, CallId, ToolCall, ToolName
from engine.server.errors import RequestError
from engine.server.field_types import Name
from engine.server.fields import Fields
from engine.server.limits import MAX_CALLS, MAX_MESSAGES, MAX_TEXT_PARTS
from engine.server.neutral import neutral


class InputText(Fields):
    """A part of a message. `annotations` and `logprobs` stand in the parts of an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: StrictStr
    annotations: NullOrEmpty = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True)]
Content = Annotated[
    Annotated[StrictStr, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(content_kind, "content_kind", "a text or a list of text parts is accepted"),
]
Status = Literal["in_progress", "completed", "incomplete"]


def joined_text(content: str | list[InputText]) -> str:
    """The text of a content. Several parts are joined by line breaks, as in a chat."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputMessage(Fields):
    """A message of the conversation. `id`, `status` and `phase` stand in answers that are sent back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Fields):
    """A call in an earlier answer. `id` and `status` stand in answers that are sent back."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: StrictStr  # JSON
    id: Name | None = None
    status: Status | None = None


class FunctionCallOutput(Fields):
    """The result of a call, which the client's tool has returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content
    id: Name | None = None
    status: Status | None = None


class ReasoningText(Fields):
    """A part of the thoughts."""

    type: Literal["reasoning_text"]
    text: StrictStr


class ReasoningItem(Fields):
    """The thoughts of an earlier answer. `summary` must be empty, because no summaries are made here."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[None, neutral([], otherwise="is not supported: null or [] is accepted")] = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)] | None = None
    encrypted_content: NullOrEmpty = None
    status: Status | None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    """The tag of the type that `value` (an item of the input) should have; None if no type fits."""
    item_type = value.get("type") if isinstance(value, dict) else None
    if item_type is None:  # OpenAI's clients leave out the type of a message
        return "message"
    return item_type if item_type in ITEM_TYPES else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind, "not_supported", f"only items of type {', '.join(ITEM_TYPES)} are supported"),
]
# At most one less than the messages of a chat: one more is for the instructions.
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]


def chat_messages(items: Sequence[InputItem]) -> list[Message]:
    """The items as messages of a chat. Thoughts, a message and calls that follow each other, in this order,
    become one message of the assistant, because they were one answer.

    Raises RequestError if more than MAX_CALLS calls follow each other.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case InputMessage(role="assistant"):
                answer = _answer(messages, without=("content", "tool_calls"))
                answer["content"] = joined_text(item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": joined_text(item.content)})
            case ReasoningItem():
                thoughts = "".join(part.text for part in item.content or ())
                if thoughts:
                    answer = _answer(messages, without=("reasoning", "content", "tool_calls"))
                    answer["reasoning"] = thoughts
            case FunctionCall():
                answer = _answer(messages, without=())  # any field may stand before a call
                calls = answer.setdefault("tool_calls", [])
                if len(calls) == MAX_CALLS:
                    message = f"input: at most {MAX_CALLS} calls that follow each other are accepted"
                    raise RequestError(400, message, param="input")
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, function=function))
            case FunctionCallOutput():
                content = joined_text(item.output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    return [Message(**message) for message in messages]


def _answer(messages: list[dict[str, Any]], without: Sequence[str]) -> dict[str, Any]:
    """The last message, if it is the assistant's and has none of the fields `without`; otherwise a new one of
    the assistant, which is added to `messages`.
    """
    if messages:
        last = messages[-1]
        if last["role"] == "assistant" and not any(field in last for field in without):
            return last
    messages.append({"role": "assistant"})
    return messages[-1]
