"""The items of a response's input, and the turns of a chat that they are. Part 20.

A client sends an answer's items back as they came, with its tools' results behind its calls.
Shapes: https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictStr, Tag

from engine.server.chat_request import Absent, Message
from engine.server.chat_tools import CalledFunction, CallId, ToolCall, ToolName
from engine.server.fields import Fields
from engine.server.limits import MAX_MESSAGES, MAX_TEXT_PARTS
from engine.server.neutral import neutral
from engine.server.protocol import Name


class InputText(Fields):
    """A part of a message. `annotations` and `logprobs` stand in the parts of an answer that is sent back."""

    type: Literal["input_text", "output_text"]
    text: StrictStr
    annotations: Absent = None
    logprobs: list[Any] | None = None


def _content_kind(value: Any) -> str | None:
    """The tag of the type that `value` (an item's content) should have; None if no type fits."""
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


class InputMessage(Fields):
    """A message of the conversation. `id`, `status` and `phase` stand in answers that are sent back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[StrictStr, Tag("text")]
        | Annotated[
            list[InputText], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True), Tag("parts")
        ],
        Discriminator(_content_kind, "content_kind", "a text or a list of text parts is accepted"),
    ]
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def text(self) -> str:
        """The content's text. Several parts are joined by line breaks, as in a chat."""
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class FunctionCall(Fields):
    """A call that an earlier answer had. `id` and `status` stand in answers that are sent back."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: StrictStr
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutput(Fields):
    """What a tool has answered to a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[
        Annotated[StrictStr, Tag("text")]
        | Annotated[
            list[InputText], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True), Tag("parts")
        ],
        Discriminator(_content_kind, "output_kind", "a text or a list of text parts is accepted"),
    ]
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)


class ReasoningText(Fields):
    type: Literal["reasoning_text"]
    text: StrictStr


class ReasoningItem(Fields):
    """Thoughts that an earlier answer had. No summaries are made of them here."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[None, neutral([], otherwise="is not supported: null or [] is accepted")] = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)] | None = None
    encrypted_content: Absent = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


Item = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    """The tag of the type that `value` (an item of the input) should have; None if no type fits."""
    if not isinstance(value, dict):
        return getattr(value, "type", None) or "message"
    kind = value.get("type")
    return "message" if kind is None else kind if kind in ITEM_TYPES else None


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


def turns_of(items: Sequence[Item]) -> list[Message]:
    """The messages of a chat. Thoughts, a message and calls that follow each other are one turn of the
    assistant, as they were one answer.
    """
    turns: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}  # the assistant's turn that is being gathered, which is the last of `turns`

    def of_answer(field: str) -> dict[str, Any]:
        """The turn to put `field` into: a new one, if the last turn has it or is another's."""
        nonlocal answer
        is_open = bool(turns) and turns[-1] is answer and field not in answer and "tool_calls" not in answer
        if not is_open:
            answer = {"role": "assistant"}
            turns.append(answer)
        return answer

    for item in items:
        match item:
            case InputMessage(role="assistant"):
                of_answer("content")["content"] = item.text()
            case InputMessage():
                turns.append({"role": item.role, "content": item.text()})
            case ReasoningItem():
                if thoughts := "".join(part.text for part in item.content or ()):
                    of_answer("reasoning")["reasoning"] = thoughts
            case FunctionCall():
                called = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=called)
                if turns and turns[-1] is answer:
                    answer.setdefault("tool_calls", []).append(call)
                else:
                    of_answer("tool_calls")["tool_calls"] = [call]
            case FunctionCallOutput():
                turns.append({"role": "tool", "content": item.text(), "tool_call_id": item.call_id})
    return [Message(**turn) for turn in turns]
