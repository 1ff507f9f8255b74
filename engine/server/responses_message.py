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
        """The events that a stream sends before the first token: the message and its part, still empty."""
        return [
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": self._message("in_progress", content=[]),
            },
            self._part_event("content_part.added") | {"part": _part("", logprobs=[])},
        ]

    def events(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict[str, Any]]:
        """OpenAI's events for what `sample` has beyond `previous`, and for the end if it has finished.

        `previous` is the same sample as it was last sent to the client; None if nothing was sent.
        """
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
        """The items of a finished answer: the message."""
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        part = _part(sample.text, self._logprobs(sample, previous=None))
        return [self._message(status, content=[part])]

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """0: a message has no thoughts."""
        return 0

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The item: the message with these content parts."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part_event(self, name: str) -> dict[str, Any]:
        """An event of type "response.`name`" about the message's one part. The caller adds the fields of this
        type.
        """
        return {"type": f"response.{name}", "item_id": self.id, "output_index": 0, "content_index": 0}

    def _logprobs(self, sample: CompletionOutput, previous: CompletionOutput | None) -> list[dict]:
        """A `token_json` for each token of `sample` beyond `previous`; [] if they were not asked for."""
        if self.num_likeliest is None:
            return []
        new_tokens = range(num_visible_tokens(previous), num_visible_tokens(sample))
        return [token_json(self.tokenizer, scores_of(sample, i), self.num_likeliest) for i in new_tokens]


def _part(text: str, logprobs: list[dict]) -> dict[str, Any]:
    """The message's one content part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
