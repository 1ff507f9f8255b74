"""Reads an answer as its pieces, and tells it in OpenAI's shapes, whole or in deltas. Extension B.

Shapes: https://platform.openai.com/docs/api-reference/chat-streaming
"""

import uuid
from dataclasses import dataclass, field
from typing import Any

from engine.decoding.outputs import CompletionOutput
from engine.server.answer_pieces import Parser, Piece


@dataclass
class Call:
    """A call as far as it has come."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    arguments: list[str] = field(default_factory=list)
    is_broken: bool = False

    def json(self) -> dict[str, Any]:
        """OpenAI's object of a whole call."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class AnswerReader:
    """Reads one sample, and tells it as a message or as deltas."""

    def __init__(
        self,
        parser: Parser,
        is_named: bool = False,
        max_calls: int | None = None,
        reasoning_parser: str | None = None,
        is_reasoning_shown: bool = True,
    ) -> None:
        """`is_named`: the request names the tool. Calls beyond `max_calls` are left out."""
        self.parser, self.is_named, self.max_calls = parser, is_named, max_calls
        self.has_reasoning, self.is_reasoning_shown = reasoning_parser is not None, is_reasoning_shown
        self.calls: list[Call] = []  # all, with those that are left out

    def pieces(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[Piece]:
        """What `sample` has beyond `previous`. Calls are kept in `calls`, too."""
        pieces = self.parser.feed(sample.text[len(previous.text) if previous else 0 :])
        if sample.finish_reason is not None:
            pieces = pieces + self.parser.end()
        for piece in pieces:
            if piece.kind == "call":
                self.calls.append(Call(piece.text))
            elif piece.kind == "arguments":
                self.calls[-1].arguments.append(piece.text)
            elif piece.kind == "broken":
                self.calls[-1].is_broken = True
        return pieces

    @property
    def has_broken_call(self) -> bool:
        return any(call.is_broken for call in self.calls)

    def shown_calls(self) -> list[Call]:
        return self.calls[: self.max_calls]

    def shown_pieces(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[Piece]:
        """As `pieces`, without thoughts and calls that are left out."""
        index, shown = len(self.calls) - 1, []
        for piece in self.pieces(sample, previous):
            index += piece.kind == "call"
            is_beyond = self.max_calls is not None and index >= self.max_calls
            if (piece.kind == "reasoning" and not self.is_reasoning_shown) or (
                piece.kind in ("call", "arguments", "broken") and is_beyond
            ):
                continue
            shown.append(piece)
        return shown

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        """The sample's. As in OpenAI's API, "tool_calls" if the model chose to call and ended by itself."""
        is_called = bool(self.calls) and not self.is_named and not self.has_broken_call
        return "tool_calls" if sample.finish_reason == "stop" and is_called else sample.finish_reason

    def message(self, sample: CompletionOutput, echoed: str = "") -> dict[str, Any]:
        """{"content", and if there are any "tool_calls" and "reasoning"} of a whole answer."""
        pieces = self.pieces(sample, None)
        thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        content = echoed + "".join(piece.text for piece in pieces if piece.kind == "content")
        message: dict[str, Any] = {"content": content or (None if self.calls or thoughts else "")}
        if self.has_reasoning:
            message["reasoning"] = (thoughts or None) if self.is_reasoning_shown else None
        if self.calls:
            message["tool_calls"] = [call.json() for call in self.shown_calls()]
        return message

    def delta(self, sample: CompletionOutput, previous: CompletionOutput | None) -> dict[str, Any]:
        """OpenAI's delta of what is new. A call begins with its index, id, type and name; its arguments
        follow in pieces. The text of a call that goes wrong in its arguments follows as content.
        """
        entries: list[dict[str, Any]] = []
        delta: dict[str, Any] = {}
        index = len(self.calls) - 1
        for piece in self.shown_pieces(sample, previous):
            index += piece.kind == "call"
            if piece.kind == "call":
                call = self.calls[index]
                function = {"name": call.name, "arguments": ""}
                entries.append({"index": index, "id": call.id, "type": "function", "function": function})
            elif piece.kind == "arguments" and entries and entries[-1]["index"] == index:
                entries[-1]["function"]["arguments"] += piece.text
            elif piece.kind == "arguments":
                entries.append({"index": index, "function": {"arguments": piece.text}})
            elif piece.kind != "broken":
                delta[piece.kind] = delta.get(piece.kind, "") + piece.text
        return delta | ({"tool_calls": entries} if entries else {})
