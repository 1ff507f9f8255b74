"""An answer as the items of a response: thoughts, a message, calls, each with OpenAI's events. Extension B.

Shapes: https://platform.openai.com/docs/api-reference/responses-streaming
"""

import uuid
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.decoding.outputs import CompletionOutput
from engine.server.answer_pieces import Piece
from engine.server.answer_reader import AnswerReader
from engine.server.reasoning import END
from engine.text.tokenizer import Tokenizer

ITEM_OF = {"reasoning": "reasoning", "content": "message", "call": "function_call"}  # by a piece's kind
TEXT_OF = {  # what an item's text is called in its events
    "reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments",
}  # fmt: skip
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass
class Item:
    """An item as far as it has come."""

    kind: str
    name: str = ""  # of the function that is called
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{uuid.uuid4().hex}"
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"

    def part(self) -> dict[str, Any]:
        """The part of a message or of thoughts, with its text so far."""
        text = "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self, status: str) -> dict[str, Any]:
        """OpenAI's object. An item in progress is sent without its text, which follows in deltas."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        parts = [] if status == "in_progress" else [self.part()]
        if self.kind == "message":
            return item | {"role": "assistant", "content": parts}
        if self.kind == "reasoning":
            return item | {"summary": [], "content": parts}
        arguments = "" if status == "in_progress" else "".join(self.text)
        return item | {"call_id": self.call_id, "name": self.name, "arguments": arguments}


class ResponseItems:
    """An AnswerItems."""

    def __init__(self, make_reader: Callable[[bool], AnswerReader], tokenizer: Tokenizer) -> None:
        """`make_reader(finds_calls)` makes what reads the answer."""
        self.make_reader, self.tokenizer = make_reader, tokenizer
        self.reader: AnswerReader | None = None  # of a stream
        self.items: list[Item] = []

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """As in AnswerItems."""
        if self.reader is None:
            self.reader = self.make_reader(True)
        events = []
        for piece in self.reader.shown_pieces(sample, previous):
            events += self._take(piece)
        if sample.finish_reason is not None:
            if not self.items:
                events += self._begin(Item("message"))
            events += self._end(_status(sample))
        return events

    def output(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """As in AnswerItems."""
        if self.reader is None:
            self.events(sample, None)
            if self.reader is not None and self.reader.has_broken_call:  # all of it is content
                self.items, self.reader = [], self.make_reader(False)
                self.events(sample, None)
        last = len(self.items) - 1
        return [item.json(_status(sample) if i == last else "completed") for i, item in enumerate(self.items)]

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """As in AnswerItems: the tokens up to the one that completes the mark of the thoughts' end."""
        if not any(item.kind == "reasoning" for item in self.items):
            return 0
        ids = list(sample.token_ids)
        is_over = partial(self._is_over, ids)
        return bisect_left(range(len(ids)), True, key=is_over) + 1 if is_over(len(ids) - 1) else len(ids)

    def _is_over(self, ids: list[int], last: int) -> bool:
        """Whether the thoughts end with the token at `last` or before."""
        return END in self.tokenizer.decode(ids[: last + 1])

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of one piece."""
        events: list[dict[str, Any]] = []
        if piece.kind == "broken":
            return events
        kind = ITEM_OF.get(piece.kind, "function_call")
        if piece.kind == "call" or not self.items or self.items[-1].kind != kind:
            events += self._end("completed")
            events += self._begin(Item(kind, piece.text if piece.kind == "call" else ""))
        if piece.kind != "call":
            self.items[-1].text.append(piece.text)
            delta = self._event(TEXT_OF[kind], "delta") | {"delta": piece.text}
            events.append(delta | ({"logprobs": []} if kind == "message" else {}))
        return events

    def _event(self, kind: str, what: str) -> dict[str, Any]:
        """An event of the last item."""
        event: dict[str, Any] = {"type": f"response.{kind}.{what}", "item_id": self.items[-1].id}
        event["output_index"] = len(self.items) - 1
        return event if self.items[-1].kind == "function_call" else event | {"content_index": 0}

    def _begin(self, item: Item) -> list[dict[str, Any]]:
        self.items.append(item)
        events = [
            {"type": "response.output_item.added", "output_index": len(self.items) - 1}
            | {"item": item.json("in_progress")}
        ]
        if item.kind == "message":
            events.append(self._event("content_part", "added") | {"part": item.part()})
        return events

    def _end(self, status: str) -> list[dict[str, Any]]:
        """The events of the last item's end."""
        if not self.items:
            return []
        item, text = self.items[-1], "".join(self.items[-1].text)
        done = self._event(TEXT_OF[item.kind], "done")
        if item.kind == "message":
            part_done = self._event("content_part", "done") | {"part": item.part()}
            events = [done | {"text": text, "logprobs": []}, part_done]
        elif item.kind == "reasoning":
            events = [done | {"text": text}]
        else:
            events = [done | {"name": item.name, "arguments": text}]
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*events, done | {"item": item.json(status)}]


def _status(sample: CompletionOutput) -> str:
    return "completed" if sample.finish_reason == "stop" else "incomplete"
