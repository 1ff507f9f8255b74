"""Turns an answer into a response's items: thoughts, messages, calls, with OpenAI's events. Extension B.

Text of one kind is one item: a new item begins where the kind of the pieces changes, and with each call.
Knows no HTTP. Shapes: https://platform.openai.com/docs/api-reference/responses-streaming
"""

import uuid
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from engine.decoding.outputs import CompletionOutput
from engine.server.answer_pieces import Piece
from engine.server.answer_reader import AnswerReader
from engine.server.reasoning import END
from engine.text.tokenizer import Tokenizer

# kind of a piece -> type of the item to which it belongs
ITEM_TYPE_OF = {
    "reasoning": "reasoning", "content": "message", "call": "function_call", "arguments": "function_call",
}  # fmt: skip
# type of an item -> name of its text in events
TEXT_NAMES = {
    "reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments",
}  # fmt: skip
ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # OpenAI's, by type of an item


@dataclass
class Item:
    """An item, as far as the model has written it."""

    type: str  # a key of TEXT_NAMES
    name: str = ""  # of the function, if the item is a call
    text: list[str] = field(default_factory=list)  # in pieces; of a call, its arguments

    def __post_init__(self) -> None:
        self.id = f"{ID_PREFIXES[self.type]}_{uuid.uuid4().hex}"
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"  # only calls show it

    def part(self) -> dict[str, Any]:
        """The content part of a message or of thoughts, with the text so far."""
        text = "".join(self.text)
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self, status: str) -> dict[str, Any]:
        """The item as OpenAI's JSON object. With status "in_progress" it has no text, which follows in
        deltas.
        """
        item: dict[str, Any] = {"id": self.id, "type": self.type, "status": status}
        is_in_progress = status == "in_progress"
        if self.type == "function_call":
            arguments = "" if is_in_progress else "".join(self.text)
            return item | {"call_id": self.call_id, "name": self.name, "arguments": arguments}
        parts = [] if is_in_progress else [self.part()]
        if self.type == "message":
            return item | {"role": "assistant", "content": parts}
        return item | {"summary": [], "content": parts}


class ResponseItems:
    """The items of one answer: an AnswerItems (chat_tools.py)."""

    def __init__(self, reader: AnswerReader, content_reader: AnswerReader, tokenizer: Tokenizer) -> None:
        """`reader` reads the answer. `content_reader` takes calls for content: it reads a whole answer again,
        if `reader` has found a broken call.
        """
        self.reader, self.content_reader, self.tokenizer = reader, content_reader, tokenizer
        self.items: list[Item] = []  # empty until text is read; a finished answer has at least one

    def opening(self) -> list[dict[str, Any]]:
        """No events: the type of the first item is known when its first piece is read."""
        return []

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """OpenAI's events for what `sample` has beyond `previous`, and for the end if it has finished.

        `previous` is the same sample as it was last sent to the client; None if nothing was sent.
        """
        events = []
        for piece in self.reader.shown_pieces(sample, previous):
            events += self._take(piece)
        if sample.finish_reason is not None:
            if not self.items:
                events += self._begin(Item("message"))
            events += self._end(_status(sample))
        return events

    def output(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The items of a finished answer. In a stream, call it after the `events` of the same sample."""
        if not self.items:  # the answer is not streamed
            self.events(sample, previous=None)
            if self.reader.has_broken_call:  # a client could not read the call, so all text is content
                self.items = []
                self.reader = self.content_reader
                self.events(sample, previous=None)
        output = [item.json("completed") for item in self.items[:-1]]
        output.append(self.items[-1].json(_status(sample)))
        return output

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """How many tokens are thoughts: those up to the one that completes the mark </think>, or all
        tokens if the mark is missing.
        """
        if not any(item.type == "reasoning" for item in self.items):
            return 0
        token_ids = list(sample.token_ids)

        def contains_end(num_tokens: int) -> bool:
            return END in self.tokenizer.decode(token_ids[:num_tokens])

        if not contains_end(len(token_ids)):
            return len(token_ids)
        # `contains_end` is False up to some number and then True, so a binary search finds the first True.
        return bisect_left(range(len(token_ids)), True, key=contains_end)

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece to the items, and return its events."""
        if piece.kind == "broken":  # the item stays as it is
            return []
        item_type = ITEM_TYPE_OF[piece.kind]
        if piece.kind == "call":
            return [*self._end("completed"), *self._begin(Item(item_type, name=piece.text))]
        events: list[dict[str, Any]] = []
        if not self.items or self.items[-1].type != item_type:
            events += [*self._end("completed"), *self._begin(Item(item_type))]
        self.items[-1].text.append(piece.text)
        delta = self._event(f"{TEXT_NAMES[item_type]}.delta") | {"delta": piece.text}
        if item_type == "message":
            delta["logprobs"] = []
        events.append(delta)
        return events

    def _event(self, name: str) -> dict[str, Any]:
        """An event of type "response.`name`" about the last item. The caller adds the fields of this type."""
        item = self.items[-1]
        event: dict[str, Any] = {"type": f"response.{name}", "item_id": item.id}
        event["output_index"] = len(self.items) - 1
        if item.type != "function_call":  # calls have no content parts
            event["content_index"] = 0
        return event

    def _begin(self, item: Item) -> list[dict[str, Any]]:
        """Add an item, and return the events of its beginning."""
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        events = [added | {"item": item.json("in_progress")}]
        if item.type == "message":
            events.append(self._event("content_part.added") | {"part": item.part()})
        return events

    def _end(self, status: str) -> list[dict[str, Any]]:
        """The events of the last item's end; [] if there is no item."""
        if not self.items:
            return []
        item = self.items[-1]
        text = "".join(item.text)
        text_done = self._event(f"{TEXT_NAMES[item.type]}.done")
        if item.type == "message":
            part_done = self._event("content_part.done") | {"part": item.part()}
            events = [text_done | {"text": text, "logprobs": []}, part_done]
        elif item.type == "reasoning":
            events = [text_done | {"text": text}]
        else:
            events = [text_done | {"name": item.name, "arguments": text}]
        item_done = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*events, item_done | {"item": item.json(status)}]


def _status(sample: CompletionOutput) -> str:
    """The status of a finished answer's last item."""
    return "completed" if sample.finish_reason == "stop" else "incomplete"
