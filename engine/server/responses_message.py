"""A response's output that is one message of text, with OpenAI's events. Part 20.

Every answer has this output, unless it may have thoughts or calls, which come with Extension B
(response_items.py). Knows no HTTP.
Shapes: https://platform.openai.com/docs/api-reference/responses-streaming
"""

import uuid
from typing import Any

from engine.decoding.outputs import CompletionOutput
from engine.server.scored import num_visible_tokens, scores_of, token_json
from engine.text.tokenizer import Tokenizer


class MessageOutput:
    """The output of one answer: an AnswerItems (chat_tools.py) with a single item, the message."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int | None) -> None:
        """`num_likeliest`: how many of the likeliest tokens are listed beside each token's log probability;
        None for an answer without log probabilities.
        """
        self.tokenizer, self.num_likeliest = tokenizer, num_likeliest
        self.id = f"msg_{uuid.uuid4().hex}"

    def opening(self) -> list[dict[str, Any]]:
        """As in AnswerItems."""
        added = {"type": "response.output_item.added", "output_index": 0}
        part_added = self._part_event("content_part.added")
        return [added | {"item": self._message("in_progress", [])}, part_added | {"part": _part("", [])}]

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """As in AnswerItems."""
        num_sent = len(previous.text) if previous else 0  # characters
        new_text = sample.text[num_sent:]
        new_logprobs = self._logprobs(sample, previous)
        events = []
        if new_text or new_logprobs:  # the tokens of a stop string have no text
            delta = self._part_event("output_text.delta")
            events.append(delta | {"delta": new_text, "logprobs": new_logprobs})
        if sample.finish_reason is not None:
            logprobs = self._logprobs(sample, previous=None)
            (message,) = self.output(sample)
            events += [
                self._part_event("output_text.done") | {"text": sample.text, "logprobs": logprobs},
                self._part_event("content_part.done") | {"part": _part(sample.text, logprobs)},
                {"type": "response.output_item.done", "output_index": 0, "item": message},
            ]
        return events

    def output(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """As in AnswerItems."""
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        part = _part(sample.text, self._logprobs(sample, previous=None))
        return [self._message(status, [part])]

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """As in AnswerItems: a message has no thoughts."""
        return 0

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The item: the message with these content parts."""
        item = {"id": self.id, "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _part_event(self, name: str) -> dict[str, Any]:
        """An event about the message's one part. `name` is its type without "response."."""
        place = {"item_id": self.id, "output_index": 0, "content_index": 0}
        return {"type": f"response.{name}"} | place

    def _logprobs(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict]:
        """A `token_json` for each token of `sample` beyond `previous`; [] if they were not asked for."""
        if self.num_likeliest is None:
            return []
        new_tokens = range(num_visible_tokens(previous), num_visible_tokens(sample))
        return [token_json(self.tokenizer, scores_of(sample, i), self.num_likeliest) for i in new_tokens]


def _part(text: str, logprobs: list[dict]) -> dict[str, Any]:
    """The message's one content part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
