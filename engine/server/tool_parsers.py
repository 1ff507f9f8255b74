"""Parsers that find the calls of tools in an answer's text, by the names of vLLM's `--tool-call-parser`.
Extension B.

Promises that a call is one of the request's tools with a JSON object of arguments, that its arguments are
given as they come, and that anything else stays content: nothing of a text is lost but the marks and spaces
around calls. Takes the same time for each character. Does not know whether arguments fit the tool's schema.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from engine.server.answer_pieces import Gathered, Parser, Piece
from engine.server.json_scan import SPACE, CallText


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls.

    opening, closing: the marks around a call; without them, a call begins with its brace.
    fields: names of the field with the arguments; the first is the one that a schema of calls has.
    filler: characters that mean nothing between calls.
    """

    fields: tuple[str, ...] = ("arguments", "parameters")
    opening: str = ""
    closing: str = ""
    filler: str = SPACE
    first: str = ""  # a mark before the first call, which may be missing


# Hermes 2 Pro and Qwen: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling
HERMES = CallFormat(opening="<tool_call>", closing="</tool_call>")
# Llama 3.1 and later: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
LLAMA3_JSON = CallFormat(("parameters", "arguments"), filler=SPACE + ";", first="<|python_tag|>")
# storyteller's: a call, or a list of calls. Whatever must fit a schema of calls is written so.
PLAIN_JSON = CallFormat(filler=SPACE + "[],;")


class CallParser:
    """Finds calls in a text that comes in parts.

    A character is in one of three places: outside of calls, in what may become a call (a candidate), or
    behind a call whose closing mark is to come. A candidate is held back until its name and the beginning of
    its arguments are there; then it is a call for good, even if the rest is broken.
    """

    def __init__(self, names: Collection[str], format: CallFormat) -> None:
        """`names` are the request's tools."""
        self.names, self.format = names, format
        self.marks = [mark for mark in (format.opening or "{", format.first) if mark]
        self._fillers: list[str] = []  # outside of calls: they mean nothing if a call is behind them
        self._mark = ""  # the beginning of a mark, as far as it has come
        self._candidate: list[str] = []  # its text, with its mark
        self._call: CallText | None = None  # the call that is being read, from its brace on
        self._is_given = False  # whether its beginning was given
        self._is_behind = False
        self._has_calls = False
        self._pieces = Gathered()

    def feed(self, text: str) -> list[Piece]:
        """As in Parser."""
        for char in text:
            self._take(char)
        self._give_arguments()
        return self._pieces.take()

    def end(self) -> list[Piece]:
        """As in Parser. A call whose arguments were cut off stays as it is."""
        rest = "".join([*self._candidate, self._mark])
        if rest or not self._has_calls:
            self._content(rest)
        return self._pieces.take()

    def _take(self, char: str) -> None:
        if self._is_behind:
            self._take_behind(char)
        elif self._call is not None or self._candidate:
            self._take_candidate(char)
        else:
            self._take_outside(char)

    def _take_outside(self, char: str) -> None:
        mark = self._mark + char
        if mark in self.marks:
            self._mark, self._candidate = "", [mark]
            if mark == "{":
                self._begin_call()
        elif any(other.startswith(mark) for other in self.marks):
            self._mark = mark
        else:  # the first character is none of a mark
            self._mark = ""
            if mark[0] in self.format.filler:
                self._fillers.append(mark[0])
            else:
                self._content(mark[0])
            for other in mark[1:]:
                self._take_outside(other)

    def _content(self, text: str) -> None:
        """Text that is certainly none of a call, and the fillers before it."""
        self._pieces.give("content", "".join([*self._fillers, text]))
        self._fillers.clear()

    def _give_arguments(self) -> None:
        if self._call is not None and self._is_given:
            self._pieces.give("arguments", self._call.new_arguments())

    def _begin_call(self) -> None:
        self._call, self._is_given = CallText(self.names, self.format.fields), False
        self._call.take("{")

    def _take_candidate(self, char: str) -> None:
        """A character behind an opening mark, or in a call's JSON."""
        if self._call is None:
            if char == "{":
                self._candidate.append(char)
                self._begin_call()
            elif char in SPACE:
                self._candidate.append(char)
            else:
                self._give_up(char)
            return
        self._call.take(char)
        if self._call.is_broken:
            self._give_up(char)
            return
        if not self._is_given:
            self._candidate.append(char)
            if self._call.is_begun:
                assert self._call.name is not None
                self._pieces.give("call", self._call.name)
                self._is_given = self._has_calls = True
                self._candidate.clear()
                self._fillers.clear()
        if self._call.is_done:
            self._give_arguments()
            self._call, self._is_behind = None, bool(self.format.closing)

    def _give_up(self, char: str) -> None:
        """`char` shows that there is no call. What was held back is content, and `char` may begin another."""
        call, is_given = self._call, self._is_given
        self._give_arguments()
        self._call, self._is_given = None, False
        if call is not None and is_given:
            self._pieces.give("broken", "")
        elif call is not None and call.is_done:  # a JSON object that is no call
            self._candidate.append(char)
        text = "".join(self._candidate)
        self._candidate.clear()
        if text:
            self._content(text)
        if call is None or not call.is_done:
            self._take_outside(char)

    def _take_behind(self, char: str) -> None:
        """A character between a call and its closing mark. If the mark does not come, the call stands."""
        mark = self._mark + char
        if not self._mark and char in SPACE:
            self._fillers.append(char)
        elif self.format.closing.startswith(mark):
            self._mark = mark
            if mark == self.format.closing:
                self._mark, self._is_behind = "", False
                self._fillers.clear()
        else:
            self._mark, self._is_behind = "", False
            for other in mark:
                self._take_outside(other)


class ArgumentsParser:
    """The parser of an answer that is the arguments of one call, since the request names the tool."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        """As in Parser."""
        if not text:
            return []
        beginning = [] if self._has_begun else [Piece("call", self.name)]
        self._has_begun = True
        return [*beginning, Piece("arguments", text)]

    def end(self) -> list[Piece]:
        """As in Parser."""
        return []


FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "json": PLAIN_JSON}
TOOL_PARSERS: dict[str, Callable[[Collection[str]], Parser]] = {
    name: partial(CallParser, format=format) for name, format in FORMATS.items()
}
