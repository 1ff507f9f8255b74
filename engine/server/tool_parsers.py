"""Parsers that find the calls of tools in an answer's text, under the names of vLLM's `--tool-call-parser`.
Extension B.

Promises that a call names one of the request's tools, that its arguments begin as a JSON object, and that
they are passed on while the model writes them. Text outside of calls and their marks stays content, but for
fillers (`CallFormat.filler`) before a call, or between a whole call and the end. A character takes the same
time however long the text is. Does not check whether arguments fit the tool's schema.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from engine.server.answer_pieces import Piece, PieceCollector
from engine.server.json_scan import SPACE, CallText


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: as JSON objects, which may have marks around them."""

    # Names that the field with the arguments may have. A schema of calls (tool_schemas.py) has the first.
    fields: tuple[str, ...] = ("arguments", "parameters")
    opening: str = "{"  # with what each call begins: a mark, or the brace of its object
    closing: str = ""  # the mark after each call; "" if there is none
    filler: str = SPACE  # characters that mean nothing between calls
    first_mark: str = ""  # a mark before the first call, which may be missing; "" if there is none


# Hermes 2 Pro and Qwen: https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling
HERMES = CallFormat(opening="<tool_call>", closing="</tool_call>")
# Llama 3.1 and later: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
LLAMA3_JSON = CallFormat(fields=("parameters", "arguments"), filler=SPACE + ";", first_mark="<|python_tag|>")
# storyteller's: a call, or a list of calls. Whatever must fit a schema of calls is written so.
PLAIN_JSON = CallFormat(filler=SPACE + "[],;")
CALL_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "json": PLAIN_JSON}  # by the parser's name

# Where a `CallParser` is in the text: outside of calls, between an opening mark and its brace, in the JSON of
# a candidate, in the JSON of a call, or between a call and its closing mark.
Place = Literal["outside", "behind mark", "in candidate", "in call", "behind call"]


class CallParser:
    """Finds calls in a text that the model is still writing.

    Text that may become a call is a candidate. It begins with an opening mark or a brace, and is held back
    until its name is complete and its arguments have begun. From then on it is a call, and its arguments are
    passed on, even if they turn out to be broken.
    """

    def __init__(self, names: Collection[str], format: CallFormat) -> None:
        """`names` are the names of the request's tools."""
        self.names, self.format = names, format
        self.marks = [format.opening]
        if format.first_mark:
            self.marks.append(format.first_mark)
        self._place: Place = "outside"
        self._fillers: list[str] = []  # held back: left out before a call, and from a whole call to the end
        self._mark_beginning = ""  # held back: it may become a mark
        self._candidate: list[str] = []  # held back: the text of the candidate, with its mark
        self._json = CallText(names, format.fields)  # of the latest candidate or call, from its brace on
        self._is_behind_call = False  # whether there was a call, not a broken one, and no content since
        self._pieces = PieceCollector()

    def feed(self, text: str) -> list[Piece]:
        """Read the next part of the answer, and return the pieces that are certain now."""
        for char in text:
            self._take(char)
        if self._place == "in call":
            self._pass_arguments_on()
        return self._pieces.take_all()

    def end(self) -> list[Piece]:
        """Return the pieces of the text that was held back, because the answer has ended. A call whose
        arguments were cut off stays as it is.
        """
        rest = "".join([*self._candidate, self._mark_beginning])
        if rest or not self._is_behind_call:
            self._add_content(rest)
        return self._pieces.take_all()

    def _take(self, char: str) -> None:
        """Take the next character."""
        match self._place:
            case "outside":
                self._take_outside(char)
            case "behind mark":
                self._take_behind_mark(char)
            case "in candidate":
                self._take_in_candidate(char)
            case "in call":
                self._take_in_call(char)
            case "behind call":
                self._take_behind_call(char)

    def _take_outside(self, char: str) -> None:
        """Take a character outside of calls and candidates."""
        beginning = self._mark_beginning + char
        self._mark_beginning = ""
        if beginning in self.marks:
            self._candidate = [beginning]
            if beginning == "{":
                self._begin_json()
            else:
                self._place = "behind mark"
        elif any(mark.startswith(beginning) for mark in self.marks):
            self._mark_beginning = beginning
        else:  # the first character does not begin a mark; one of the others may
            if beginning[0] in self.format.filler:
                self._fillers.append(beginning[0])
            else:
                self._add_content(beginning[0])
            for next_char in beginning[1:]:
                self._take(next_char)

    def _take_behind_mark(self, char: str) -> None:
        """Take a character between an opening mark and its brace."""
        if char == "{":
            self._candidate.append(char)
            self._begin_json()
        elif char in SPACE:
            self._candidate.append(char)
        else:
            self._add_candidate_as_content()
            self._take_outside(char)

    def _begin_json(self) -> None:
        """Take the opening brace of a candidate's JSON."""
        self._place = "in candidate"
        self._json = CallText(self.names, self.format.fields)
        self._json.take("{")

    def _take_in_candidate(self, char: str) -> None:
        """Take a character in the JSON of a candidate."""
        self._json.take(char)
        if not self._json.is_broken:
            self._candidate.append(char)
            if self._json.is_begun:
                self._begin_call()
        elif self._json.is_done:  # complete, but no call, such as {"a": 1}
            self._candidate.append(char)
            self._add_candidate_as_content()
        else:
            self._add_candidate_as_content()
            self._take_outside(char)  # it may begin another mark

    def _begin_call(self) -> None:
        """Make the candidate a call."""
        assert self._json.name is not None  # as `is_begun` says
        self._pieces.add("call", self._json.name)
        self._place = "in call"
        self._is_behind_call = True
        self._candidate.clear()
        self._fillers.clear()

    def _take_in_call(self, char: str) -> None:
        """Take a character in the JSON of a call."""
        self._json.take(char)
        if self._json.is_broken:
            self._pass_arguments_on()
            self._pieces.add("broken", "")
            self._is_behind_call = False  # all that follows is content
            self._place = "outside"
            self._take_outside(char)
        elif self._json.is_done:
            self._pass_arguments_on()
            self._place = "behind call" if self.format.closing else "outside"

    def _take_behind_call(self, char: str) -> None:
        """Take a character between a call and its closing mark. Without the mark, the call stands as well."""
        beginning = self._mark_beginning + char
        if char in SPACE and not self._mark_beginning:
            self._fillers.append(char)
        elif beginning == self.format.closing:
            self._mark_beginning = ""
            self._fillers.clear()
            self._place = "outside"
        elif self.format.closing.startswith(beginning):
            self._mark_beginning = beginning
        else:
            self._mark_beginning = ""
            self._place = "outside"
            for next_char in beginning:
                self._take(next_char)

    def _pass_arguments_on(self) -> None:
        """Add the arguments of the call that have come since the last time."""
        self._pieces.add("arguments", self._json.new_arguments())

    def _add_candidate_as_content(self) -> None:
        """Add the text of a candidate that is no call."""
        self._add_content("".join(self._candidate))
        self._candidate.clear()
        self._place = "outside"

    def _add_content(self, text: str) -> None:
        """Add text that certainly belongs to no call, after the fillers before it."""
        self._pieces.add("content", "".join([*self._fillers, text]))
        self._fillers.clear()
        self._is_behind_call = False


class ArgumentsParser:
    """The parser of an answer that consists of the arguments of one call, because the request names the
    tool that the model must call.
    """

    def __init__(self, name: str) -> None:
        """`name` is the tool's."""
        self.name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        """Read the next part of the answer. The first piece is the call, with its name."""
        if not text:
            return []
        if self._has_begun:
            return [Piece("arguments", text)]
        self._has_begun = True
        return [Piece("call", self.name), Piece("arguments", text)]

    def end(self) -> list[Piece]:
        """Return nothing: no text was held back."""
        return []
