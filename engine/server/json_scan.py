"""Tells of a JSON object that comes character by character where it ends, and whether it still is one.
Extension B.

Promises a decision at each character, in the same time for each: the text so far can become an object, is
one, or can never be one (RFC 8259). Does not know what the object means; `CallText` does, for one call.
"""

import json
import re
from collections.abc import Collection

SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
LITERALS = ("true", "false", "null")
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
ESCAPES = frozenset('"\\/bfnrtu')


class ObjectScan:
    """A JSON object, from its opening brace on."""

    def __init__(self) -> None:
        self.open: list[str] = []  # the brackets that are open, outermost first
        self.is_done = self.is_broken = False
        self.expects = "object"  # what the next character may be, or belong to
        self._is_key = False  # whether the string that is being read names a field
        self._hex_digits = 0  # that are still to come, of an escaped character
        self._word = ""  # the number or literal so far

    def take(self, char: str) -> None:
        """Take the next character. Takes none after the object is done or broken."""
        if self.expects == "string":
            self._string(char)
        elif self.expects == "escape":
            self._escape(char)
        elif self.expects == "word":
            self._in_word(char)
        elif char not in SPACE:
            self._outside(char)
        elif not self.open:  # a space before the object
            self.is_broken = True

    def _string(self, char: str) -> None:
        if char == "\\":
            self.expects = "escape"
        elif char == '"':
            self.expects = "colon" if self._is_key else "after"
        elif char < " ":
            self.is_broken = True

    def _escape(self, char: str) -> None:
        if self._hex_digits:
            self.is_broken = char not in HEX_DIGITS
            self._hex_digits -= 1
        else:
            self.is_broken = char not in ESCAPES
            self._hex_digits = 4 if char == "u" else 0
        if not self._hex_digits:
            self.expects = "string"

    def _in_word(self, char: str) -> None:
        """A character that belongs to a number or literal, or ends it."""
        if char.isalnum() or char in "+-.":
            self._word += char
            self.is_broken = len(self._word) > 400  # no number that a program can read
            return
        self.is_broken = self._word not in LITERALS and not NUMBER.fullmatch(self._word)
        self.expects = "after"
        if not self.is_broken and char not in SPACE:
            self._outside(char)

    def _outside(self, char: str) -> None:
        """A character outside of strings, numbers and literals."""
        expects = self.expects
        is_value = expects in ("value", "value or end")
        if expects == "colon":
            self.is_broken, self.expects = char != ":", "value"
        elif expects == "after" and char == ",":
            self.expects = "key" if self.open[-1] == "{" else "value"
        elif char in "}]" and expects in ("after", "key or end", "value or end"):
            self.is_broken = self.open.pop() + char not in ("{}", "[]")
            self.is_done, self.expects = not self.open, "after"
        elif char == '"' and (is_value or expects in ("key", "key or end")):
            self._is_key, self.expects = not is_value, "string"
        elif char == "{" and (is_value or expects == "object"):
            self.open.append(char)
            self.expects = "key or end"
        elif char == "[" and is_value:
            self.open.append(char)
            self.expects = "value or end"
        elif is_value and (char.isalnum() or char == "-"):
            self._word, self.expects = char, "word"
        else:
            self.is_broken = True


class CallText:
    """The JSON of one call as it comes: {"name": a tool's, "arguments": {…}}.

    `is_broken`: it can never be one. `is_begun`: its name and the beginning of its arguments have come, and
    `new_arguments` gives the rest as it comes. Fields beside these two are ignored. The fields may stand in
    any order; arguments before the name wait for the name.
    """

    def __init__(self, names: Collection[str], fields: Collection[str]) -> None:
        """`names` are the tools'; `fields` are names of the field with the arguments."""
        self.names, self.fields = names, fields
        self.name: str | None = None
        self._arguments: list[str] = []  # their characters that were not asked for yet
        self.scan = ObjectScan()
        self._has_arguments = False
        self._field = ""  # the field whose value is being read
        self._text: list[str] = []  # of the name or value that is being read

    @property
    def is_begun(self) -> bool:
        return self.name is not None and self._has_arguments

    @property
    def is_broken(self) -> bool:
        return self.scan.is_broken or (self.scan.is_done and not self.is_begun)

    @property
    def is_done(self) -> bool:
        return self.scan.is_done

    def new_arguments(self) -> str:
        """The arguments' text that has come since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def take(self, char: str) -> None:
        """Take the next character, the first of which is the opening brace."""
        scan = self.scan
        before, depth = scan.expects, len(scan.open)
        scan.take(char)
        if scan.is_broken or depth == 0:
            return
        is_inside = depth > 1 or len(scan.open) > 1  # of a value that is an object or a list
        if depth == 1 and before in ("value", "key", "key or end") and char not in SPACE:
            self._begin(before == "value", char)
        elif is_inside or before in ("string", "escape"):
            if self._field in self.fields and is_inside:
                self._arguments.append(char)
            elif not is_inside:
                self._text.append(char)
        if depth == 1 and before == "string" and scan.expects != "string":
            self._end_of_string(scan.expects)

    def _begin(self, is_value: bool, char: str) -> None:
        """A name or a value begins with `char`, or the object ends."""
        self._text = [char]
        if is_value and self._field in self.fields:
            if char != "{" or self._has_arguments:
                self.scan.is_broken = True
            else:
                self._arguments, self._has_arguments = [char], True
        elif is_value and self._field == "name":
            self.scan.is_broken |= char != '"' or self.name is not None

    def _end_of_string(self, expects: str) -> None:
        """The string in `_text` is complete, unless an escape begins."""
        if expects == "escape":
            return
        text = json.loads("".join(self._text))
        if expects == "colon":
            self._field = text
        elif self._field == "name":
            self.name = text
            self.scan.is_broken |= text not in self.names
