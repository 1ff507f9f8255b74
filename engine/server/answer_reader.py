"""Turns an answer's text into OpenAI's message, whole or in deltas, with thoughts and calls. Extension B.

A parser (answer_pieces.py) divides the text into pieces. Knows no HTTP, and not how a model writes calls.
Shapes: https://platform.openai.com/docs/api-reference/chat-streaming
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.decoding.outputs import CompletionOutput
from engine.server.answer_pieces import Parser, Piece


@dataclass
class Call:
    """A call of a tool, as far as the model has written it."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    arguments: list[str] = field(default_factory=list)  # JSON text, in pieces
    is_broken: bool = False  # whether the arguments turned out not to be a JSON object

    def json(self) -> dict[str, Any]:
        """The call as OpenAI's JSON object."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class AnswerReader:
    """Reads one sample, either whole (`message`) or as a stream (only `delta`, or only `shown_pieces`)."""

    def __init__(
        self,
        parser: Parser,
        *,
        is_tool_named: bool,
        max_calls: int | None,
        has_reasoning: bool,
        is_reasoning_shown: bool,
    ) -> None:
        """`is_tool_named`: the request says which tool the model must call. `max_calls`: further calls are
        left out of the answer; None means no bound. `has_reasoning`: the server separates thoughts from
        answers, so a message has the field "reasoning". `is_reasoning_shown`: thoughts are in the answer.
        """
        self.parser, self.is_tool_named, self.max_calls = parser, is_tool_named, max_calls
        self.has_reasoning, self.is_reasoning_shown = has_reasoning, is_reasoning_shown
        self.calls: list[Call] = []  # all calls, including those that are left out of the answer

    def pieces(self, sample: CompletionOutput, previous: CompletionOutput | None) -> Iterator[Piece]:
        """Yields the pieces of the text that `sample` has beyond `previous`. When a piece is yielded, `calls`
        has the calls up to that piece.

        `previous` is the same sample as it was last read; None if it was not read yet.
        """
        num_read = len(previous.text) if previous else 0  # characters
        pieces = self.parser.feed(sample.text[num_read:])
        if sample.finish_reason is not None:
            pieces = pieces + self.parser.end()
        for piece in pieces:
            if piece.kind == "call":
                self.calls.append(Call(piece.text))
            elif piece.kind == "arguments":
                self.calls[-1].arguments.append(piece.text)
            elif piece.kind == "broken":
                self.calls[-1].is_broken = True
            yield piece

    @property
    def has_broken_call(self) -> bool:
        """Whether the arguments of any call turned out not to be a JSON object."""
        return any(call.is_broken for call in self.calls)

    def shown_pieces(self, sample: CompletionOutput, previous: CompletionOutput | None) -> Iterator[Piece]:
        """As `pieces`, without thoughts and calls that are left out of the answer."""
        for piece in self.pieces(sample, previous):
            match piece.kind:
                case "reasoning":
                    is_shown = self.is_reasoning_shown
                case "content":
                    is_shown = True
                case "call" | "arguments" | "broken":  # of the last call so far
                    is_shown = self.max_calls is None or len(self.calls) <= self.max_calls
            if is_shown:
                yield piece

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        """The sample's finish reason. As in OpenAI's API, it is "tool_calls" instead of "stop" if the model
        itself chose the tool that it calls, and no call is broken.
        """
        model_chose_call = bool(self.calls) and not self.is_tool_named and not self.has_broken_call
        if sample.finish_reason == "stop" and model_chose_call:
            return "tool_calls"
        return sample.finish_reason

    def message(self, sample: CompletionOutput, echoed: str = "") -> dict[str, Any]:
        """The fields of a whole answer's message: "content" (null if there are only thoughts or calls),
        "reasoning" if the server separates thoughts (null without shown thoughts), and "tool_calls" if there
        are any. `echoed` is put before the content.
        """
        pieces = list(self.pieces(sample, previous=None))
        thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        content = echoed + "".join(piece.text for piece in pieces if piece.kind == "content")
        is_nothing_said = not content and bool(self.calls or thoughts)
        message: dict[str, Any] = {"content": None if is_nothing_said else content}
        if self.has_reasoning:
            is_shown = bool(thoughts) and self.is_reasoning_shown
            message["reasoning"] = thoughts if is_shown else None
        if self.calls:
            message["tool_calls"] = [call.json() for call in self.calls[: self.max_calls]]
        return message

    def delta(self, sample: CompletionOutput, previous: CompletionOutput | None) -> dict[str, Any]:
        """OpenAI's delta: what `sample` has beyond `previous`. Several pieces of one kind are joined.

        The delta in which a call begins has its index, id, type and name; later deltas have its index. Each
        also has the new part of the arguments.
        """
        entries: list[dict[str, Any]] = []  # of `tool_calls`
        delta: dict[str, Any] = {}
        for piece in self.shown_pieces(sample, previous):
            index = len(self.calls) - 1  # of the last call so far
            if piece.kind == "call":
                call = self.calls[index]
                function = {"name": call.name, "arguments": ""}
                entries.append({"index": index, "id": call.id, "type": "function", "function": function})
            elif piece.kind == "arguments":
                if not entries or entries[-1]["index"] != index:
                    entries.append({"index": index, "function": {"arguments": ""}})
                entries[-1]["function"]["arguments"] += piece.text
            elif piece.kind in ("reasoning", "content"):  # also the names of the fields
                delta[piece.kind] = delta.get(piece.kind, "") + piece.text
        if entries:
            delta["tool_calls"] = entries
        return delta
