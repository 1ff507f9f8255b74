"""Parsers that find the calls of tools in an answer's text, under the names of vLLM's `--tool-call-parser`.
Extension B.

Promises that a call names one of the request's tools and has a JSON object of arguments, that the arguments
are passed on while the model writes them, and that all other text stays content: only the marks and spaces
around calls are left out. A character takes the same time however long the text is. Does not check whether
arguments fit the tool's schema.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from engine.server.answer_pieces import Parser, Piece, PieceCollector
from engine.server.json_scan import SPACE, CallText


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: as JSON objects, which may have marks around them."""

    # Names that the field with the arguments may have. A schema of calls (tool_schemas.py) has the first.
    fields: tuple[str, ...] = ("arguments", "parameters")
    opening: str = ""  # the mark before each call; "" if a call begins with its brace
    closing: str = ""  # the mark after each call; "" if there is none
    filler: str = SPACE  # characters that mean nothing between calls
    first: str = ""  # a mark before the first call, which may be missing; "" if there is none


# Hermes 2 Pro and Qwen: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling
HERMES = CallFormat(opening="<tool_call>", closing="</tool_call>")
# Llama 3.1 and later: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
LLAMA3_JSON = CallFormat(("parameters", "arguments"), filler=SPACE + ";", first="<|python_tag|>")
# storyteller's: a call, or a list of calls. Whatever must fit a schema of calls is written so.
PLAIN_JSON = CallFormat(filler=SPACE + "[],;")


class CallParser:
    """Finds calls in a text that the model is still writing.

    The parser is always in one of three places: outside of calls, in text that may become a call (the
    candidate), or behind a call whose closing mark is still to come. A candidate is held back until its name
    is complete and its arguments have begun. From then on it is a call, and its arguments are passed on, even
    if they turn out to be broken.
    """

    def __init__(self, names: Collection[str], format: CallFormat) -> None:
        """`names` are the names of the request's tools."""
        self.names, self.format = names, format
        self.marks = [mark for mark in (format.opening or "{", format.first) if mark]
        self._fillers: list[str] = []  # held back: they are left out if a call follows, and content otherwise
        self._mark_beginning = ""  # held back: it may become a mark
        self._candidate: list[str] = []  # held back: the text of the candidate, with its mark
        self._call: CallText | None = None  # the candidate's or the call's JSON, from its brace on
        self._is_certain = False  # whether `_call` is certainly a call, so that its name was passed on
        self._is_behind_call = False  # whether a closing mark is still to come
        self._has_calls = False
        self._pieces = PieceCollector()

    def feed(self, text: str) -> list[Piece]:
        """As in Parser."""
        for char in text:
            self._take(char)
        self._pass_arguments_on()
        return self._pieces.take_all()

    def end(self) -> list[Piece]:
        """As in Parser. A call whose arguments were cut off stays as it is."""
        rest = "".join([*self._candidate, self._mark_beginning])
        if rest or not self._has_calls:
            self._add_content(rest)
        return self._pieces.take_all()

    def _take(self, char: str) -> None:
        """Take the next character, in whichever of the three places the parser is."""
        if self._is_behind_call:
            self._take_behind_call(char)
        elif self._call is not None or self._candidate:
            self._take_in_candidate(char)
        else:
            self._take_outside(char)

    def _take_outside(self, char: str) -> None:
        """Take a character outside of calls and candidates."""
        beginning = self._mark_beginning + char
        if beginning in self.marks:
            self._mark_beginning, self._candidate = "", [beginning]
            if beginning == "{":
                self._begin_json()
        elif any(mark.startswith(beginning) for mark in self.marks):
            self._mark_beginning = beginning
        else:  # the first character does not begin a mark; one of the others may
            self._mark_beginning = ""
            first, rest = beginning[0], beginning[1:]
            if first in self.format.filler:
                self._fillers.append(first)
            else:
                self._add_content(first)
            for next_char in rest:
                self._take_outside(next_char)

    def _add_content(self, text: str) -> None:
        """Add text that certainly belongs to no call, after the fillers before it."""
        self._pieces.add("content", "".join([*self._fillers, text]))
        self._fillers.clear()

    def _pass_arguments_on(self) -> None:
        """Add the arguments that have come since the last time, if there certainly is a call."""
        if self._call is not None and self._is_certain:
            self._pieces.add("arguments", self._call.new_arguments())

    def _begin_json(self) -> None:
        """Take the opening brace of a candidate's JSON."""
        self._call, self._is_certain = CallText(self.names, self.format.fields), False
        self._call.take("{")

    def _take_in_candidate(self, char: str) -> None:
        """Take a character behind an opening mark, or in the JSON of a candidate or a call."""
        if self._call is None:
            if char == "{":
                self._candidate.append(char)
                self._begin_json()
            elif char in SPACE:
                self._candidate.append(char)
            else:
                self._give_up(char)
            return
        self._call.take(char)
        if self._call.is_broken:
            self._give_up(char)
            return
        if not self._is_certain:
            self._candidate.append(char)
            if self._call.is_begun:
                assert self._call.name is not None
                self._pieces.add("call", self._call.name)
                self._is_certain = self._has_calls = True
                self._candidate.clear()
                self._fillers.clear()
        if self._call.is_done:
            self._pass_arguments_on()
            self._call, self._is_behind_call = None, bool(self.format.closing)

    def _give_up(self, char: str) -> None:
        """Take a character that shows that there is no call, or that the call is broken. The text that was
        held back is content, and `char` may begin another mark.
        """
        call, is_certain = self._call, self._is_certain
        self._pass_arguments_on()
        self._call, self._is_certain = None, False
        is_complete_json = call is not None and call.is_done  # such as {"a": 1}, which is no call
        if call is not None and is_certain:
            self._pieces.add("broken", "")
        elif is_complete_json:
            self._candidate.append(char)
        text = "".join(self._candidate)
        self._candidate.clear()
        if text:
            self._add_content(text)
        if not is_complete_json:
            self._take_outside(char)

    def _take_behind_call(self, char: str) -> None:
        """Take a character between a call and its closing mark. Without the mark, the call stands as well."""
        beginning = self._mark_beginning + char
        if not self._mark_beginning and char in SPACE:
            self._fillers.append(char)
        elif beginning == self.format.closing:
            self._mark_beginning, self._is_behind_call = "", False
            self._fillers.clear()
        elif self.format.closing.startswith(beginning):
            self._mark_beginning = beginning
        else:
            self._mark_beginning, self._is_behind_call = "", False
            for next_char in beginning:
                self._take_outside(next_char)


class ArgumentsParser:
    """The parser of an answer that consists of the arguments of one call, because the request names the
    tool that the model must call.
    """

    def __init__(self, name: str) -> None:
        """`name` is the tool's."""
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
