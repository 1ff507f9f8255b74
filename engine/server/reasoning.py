"""Parsers that tell a model's thoughts from its answer, by the names of vLLM's `--reasoning-parser`.
Extension B.

Promises that thoughts and the rest are the text, but for the two marks. Does not know what the rest is: it is
handed to another parser, as it comes.
"""

from engine.server.answer_pieces import Parser, Piece, num_held_back

START, END = "<think>", "</think>"


class ThinkParser:
    """Qwen3's thoughts: from <think>, the first of a text, to </think>.

    A model that does not begin with <think> has no thoughts, except if the prompt has begun them, as
    templates of later models do. Thoughts that never end are all thoughts.
    """

    def __init__(self, inner: Parser, is_thinking: bool = False) -> None:
        """`inner` reads what comes behind the thoughts. `is_thinking`: the prompt ends inside thoughts."""
        self.inner = inner
        self.state = "thinking" if is_thinking else "before"  # then "after"
        self._held_back = ""

    def feed(self, text: str) -> list[Piece]:
        """As in Parser."""
        if self.state == "after":
            return self.inner.feed(text)
        text, self._held_back = self._held_back + text, ""
        if self.state == "before":
            begun = text.lstrip()
            if START.startswith(begun):
                if begun == START:
                    self.state = "thinking"
                else:
                    self._held_back = text
                return []
            if not begun.startswith(START):
                self.state = "after"
                return self.inner.feed(text)
            self.state, text = "thinking", begun.removeprefix(START)
        thoughts, end, rest = text.partition(END)
        if not end:
            certain = len(text) - num_held_back(text, [END])
            thoughts, self._held_back = text[:certain], text[certain:]
        pieces = [Piece("reasoning", thoughts)] if thoughts else []
        if end:
            self.state = "after"
            pieces += self.inner.feed(rest)
        return pieces

    def end(self) -> list[Piece]:
        """As in Parser."""
        held_back, self._held_back = self._held_back, ""
        if self.state == "thinking":
            return [Piece("reasoning", held_back)] if held_back else []
        return [*self.inner.feed(held_back), *self.inner.end()]


def ends_in_thoughts(prompt: str) -> bool:
    """Whether a prompt has begun thoughts and not ended them."""
    return prompt.rfind(START) > prompt.rfind(END)


REASONING_PARSERS = {"qwen3": ThinkParser}
