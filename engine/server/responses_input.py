"""The items of a response's input, and how they become messages of a chat. Part 20.

A client sends the items of earlier answers back unchanged, with the results of its tools after the calls.
Shapes: https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictStr, Tag

from engine.server.chat_request import Absent, Message, content_kind
from engine.server.chat_tools import CalledFunction, CallId, ToolCall, ToolName
from engine.server.field_types import Name
from engine.server.fields import Fields
from engine.server.limits import MAX_MESSAGES, MAX_TEXT_PARTS
from engine.server.neutral import neutral


class InputText(Fields):
    """A part of a message. `annotations` and `logprobs` stand in the parts of an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: StrictStr
    annotations: Absent = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(Fields):
    """A message of the conversation. `id`, `status` and `phase` stand in answers that are sent back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[Parts, Tag("parts")],
        Discriminator(content_kind, "content_kind", "a text or a list of text parts is accepted"),
    ]
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def text(self) -> str:
        """The content's text. Several parts are joined by line breaks, as in a chat."""
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


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
    output: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[Parts, Tag("parts")],
        Discriminator(content_kind, "output_kind", "a text or a list of text parts is accepted"),
    ]
    id: Name | None = None
    status: Status | None = None

    def text(self) -> str:
        """The output's text. Several parts are joined by line breaks."""
        output = self.output
        return output if isinstance(output, str) else "\n".join(part.text for part in output)


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
    encrypted_content: Absent = None
    status: Status | None = None


Item = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    """The tag of the type that `value` (an item of the input) should have; None if no type fits."""
    if not isinstance(value, dict):  # an item that is parsed already
        return getattr(value, "type", None) or "message"
    item_type = value.get("type")
    if item_type is None:  # OpenAI's clients leave out the type of a message
        return "message"
    return item_type if item_type in ITEM_TYPES else None


Items = Annotated[
    list[
        Annotated[
            Annotated[InputMessage, Tag("message")]
            | Annotated[FunctionCall, Tag("function_call")]
            | Annotated[FunctionCallOutput, Tag("function_call_output")]
            | Annotated[ReasoningItem, Tag("reasoning")],
            Discriminator(
                _item_kind, "not_supported", f"only items of type {', '.join(ITEM_TYPES)} are supported"
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True),  # one more is for the instructions
]


def chat_messages(items: Sequence[Item]) -> list[Message]:
    """The items as messages of a chat. Thoughts, a message and calls that follow each other, in this order,
    become one message of the assistant, because they were one answer.
    """
    messages: list[dict[str, Any]] = []

    def assistants_message(field: str) -> dict[str, Any]:
        """The message of the assistant that `field` belongs to: the last message, or a new one if the last
        has the field already, has calls already, or is not the assistant's.
        """
        last = messages[-1] if messages else {"role": ""}
        has_room = field not in last and "tool_calls" not in last
        if last["role"] != "assistant" or not has_room:
            messages.append({"role": "assistant"})
        return messages[-1]

    for item in items:
        match item:
            case InputMessage(role="assistant"):
                assistants_message("content")["content"] = item.text()
            case InputMessage():
                messages.append({"role": item.role, "content": item.text()})
            case ReasoningItem():
                if thoughts := "".join(part.text for part in item.content or ()):
                    assistants_message("reasoning")["reasoning"] = thoughts
            case FunctionCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=function)
                if messages and messages[-1]["role"] == "assistant":  # a message may have several calls
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "tool_calls": [call]})
            case FunctionCallOutput():
                messages.append({"role": "tool", "content": item.text(), "tool_call_id": item.call_id})
    return [Message(**message) for message in messages]
