"""Parsers that separate a model's thoughts from its answer, under the names of vLLM's `--reasoning-parser`.
Extension B.

Promises that no text is lost: thoughts and the rest together are the answer's text without the two marks
and the spaces before the first. The rest is passed on to another parser, which finds the calls in it.
"""

from typing import Literal

from engine.server.answer_pieces import Parser, Piece, num_held_back

START, END = "<think>", "</think>"


class ThinkParser:
    """Qwen3's thoughts: the text from <think>, with which the answer begins, to </think>.

    An answer that does not begin with <think> has no thoughts, unless the prompt has begun them, as templates
    of later models do. If </think> is missing, all text behind <think> is thoughts.
    """

    def __init__(self, inner: Parser, is_thinking: bool = False) -> None:
        """`inner` reads the text behind the thoughts. `is_thinking`: the prompt has begun thoughts."""
        self.inner = inner
        self.state: Literal["before", "thinking", "after"] = "thinking" if is_thinking else "before"
        self._held_back = ""  # text that may be the beginning of a mark

    def feed(self, text: str) -> list[Piece]:
        """Read the next part of the answer, and return the pieces that are certain now."""
        text = self._held_back + text
        self._held_back = ""
        if self.state == "before":
            stripped = text.lstrip()
            if stripped.startswith(START):
                self.state = "thinking"
                text = stripped.removeprefix(START)
            elif START.startswith(stripped):  # the mark may still be incomplete
                self._held_back = text
                return []
            else:
                self.state = "after"
        if self.state == "thinking":
            return self._feed_thoughts(text)
        return self.inner.feed(text)

    def _feed_thoughts(self, text: str) -> list[Piece]:
        """Read text that begins within the thoughts. It may have their end in it."""
        thoughts, end_mark, rest = text.partition(END)
        if end_mark:
            self.state = "after"
            return [*_reasoning(thoughts), *self.inner.feed(rest)]
        num_certain = len(text) - num_held_back(text, END)
        self._held_back = text[num_certain:]
        return _reasoning(text[:num_certain])

    def end(self) -> list[Piece]:
        """Return the pieces of the text that was held back, because the answer has ended."""
        if self.state == "thinking":
            return _reasoning(self._held_back)
        return [*self.inner.feed(self._held_back), *self.inner.end()]


def ends_in_thoughts(prompt: str) -> bool:
    """Whether a prompt has a <think> with no </think> behind it."""
    return prompt.rfind(START) > prompt.rfind(END)


def _reasoning(text: str) -> list[Piece]:
    """The thoughts `text` as a piece; [] for an empty text."""
    return [Piece("reasoning", text)] if text else []


REASONING_PARSERS = {"qwen3": ThinkParser}
