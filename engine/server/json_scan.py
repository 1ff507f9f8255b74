"""Checks JSON while a model writes it, character by character. Extension B.

`ObjectScan` says after each character whether the text so far can become a JSON object, is one, or can never
become one (RFC 8259). `CallText` also reads the fields of one call. Each character takes the same time,
however long the text is.
"""

import json
import re
from collections.abc import Collection
from typing import Literal

SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
LITERALS = ("true", "false", "null")
MAX_WORD_CHARACTERS = 400  # of a number or literal; a float of 64 bits needs fewer
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
ESCAPES = frozenset('"\\/bfnrtu')

# What the next character of an `ObjectScan` may be.
Expected = Literal[
    "object", "key", "colon", "value", "key or end", "value or end", "comma or end",
    "string", "escape", "word",
]  # fmt: skip


class ObjectScan:
    """Scans one JSON object, from its opening brace on.

    `expects` says what the next character may be:

    - "object": the opening brace;
    - "key", "colon", "value": the beginning of a field's name, the colon behind it, the beginning of a value;
    - "key or end", "value or end": the beginning of a name or of a value, or the closing bracket;
    - "comma or end": a comma or the closing bracket, behind a value;
    - "string", "escape", "word": the rest of a string, of an escaped character, of a number or literal.
    """

    def __init__(self) -> None:
        self.open_brackets: list[str] = []  # outermost first
        self.is_done = False  # whether the object is complete
        self.is_broken = False  # whether the text can never become an object
        self.expects: Expected = "object"
        self._is_key = False  # whether the string that is being read is a field's name
        self._num_hex_digits = 0  # how many digits of an escaped character are still to come
        self._word = ""  # the number or literal that is being read

    def take(self, char: str) -> None:
        """Take the next character. Must not be called once the object is done or broken."""
        if self.expects == "string":
            self._take_in_string(char)
        elif self.expects == "escape":
            self._take_in_escape(char)
        elif self.expects == "word":
            self._take_in_word(char)
        elif char not in SPACE:
            self._take_between_values(char)
        elif not self.open_brackets:  # a space before the object
            self.is_broken = True

    def _take_in_string(self, char: str) -> None:
        if char == "\\":
            self.expects = "escape"
        elif char == '"':
            self.expects = "colon" if self._is_key else "comma or end"
        elif char < " ":  # JSON wants control characters to be escaped
            self.is_broken = True

    def _take_in_escape(self, char: str) -> None:
        if self._num_hex_digits:
            self.is_broken = char not in HEX_DIGITS
            self._num_hex_digits -= 1
        else:
            self.is_broken = char not in ESCAPES
            self._num_hex_digits = 4 if char == "u" else 0
        if not self._num_hex_digits:
            self.expects = "string"

    def _take_in_word(self, char: str) -> None:
        """Take a character that belongs to a number or literal, or follows it."""
        if char.isalnum() or char in "+-.":
            self._word += char
            self.is_broken = len(self._word) > MAX_WORD_CHARACTERS
            return
        self.is_broken = self._word not in LITERALS and not NUMBER.fullmatch(self._word)
        self.expects = "comma or end"
        if not self.is_broken and char not in SPACE:
            self._take_between_values(char)

    def _take_between_values(self, char: str) -> None:
        """Take a character outside of strings, numbers and literals that is not a space."""
        expects = self.expects
        may_be_value = expects in ("value", "value or end")
        may_be_key = expects in ("key", "key or end")
        may_be_end = expects in ("comma or end", "key or end", "value or end")
        if expects == "colon":
            self.is_broken = char != ":"
            self.expects = "value"
        elif expects == "comma or end" and char == ",":
            self.expects = "key" if self.open_brackets[-1] == "{" else "value"
        elif may_be_end and char in "}]":
            opening = self.open_brackets.pop()
            self.is_broken = opening + char not in ("{}", "[]")
            self.is_done = not self.open_brackets
            self.expects = "comma or end"
        elif (may_be_value or may_be_key) and char == '"':
            self._is_key = may_be_key
            self.expects = "string"
        elif (may_be_value or expects == "object") and char == "{":
            self.open_brackets.append(char)
            self.expects = "key or end"
        elif may_be_value and char == "[":
            self.open_brackets.append(char)
            self.expects = "value or end"
        elif may_be_value and (char.isalnum() or char == "-"):
            self._word = char
            self.expects = "word"
        else:
            self.is_broken = True


class CallText:
    """Reads the JSON of one call while the model writes it: {"name": a tool's name, "arguments": {…}}.

    The fields may stand in any order. Other fields are ignored.
    """

    def __init__(self, names: Collection[str], fields: Collection[str]) -> None:
        """`names` are the names of the tools. `fields` are the names that the arguments' field may have."""
        self.names, self.fields = names, fields
        self.name: str | None = None  # the tool's name, once it is complete
        self.scan = ObjectScan()
        self._has_arguments = False  # whether the arguments have begun
        self._arguments: list[str] = []  # characters of the arguments that `new_arguments` has not returned
        self._field = ""  # the field whose value is being read
        self._text: list[str] = []  # characters of the string that is being read
        self._is_refused = False  # whether a field has a value that no call has

    @property
    def is_begun(self) -> bool:
        """Whether the text is certainly a call: its name is complete, and its arguments have begun."""
        return self.name is not None and self._has_arguments

    @property
    def is_broken(self) -> bool:
        """Whether the text can never become a call."""
        return self.scan.is_broken or self._is_refused or (self.scan.is_done and not self.is_begun)

    @property
    def is_done(self) -> bool:
        """Whether the JSON object is complete."""
        return self.scan.is_done

    def new_arguments(self) -> str:
        """The text of the arguments since the last call of `new_arguments`."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def take(self, char: str) -> None:
        """Take the next character. The first is the opening brace. Must not be called once `is_broken` or
        `is_done`.
        """
        scan = self.scan
        expected, depth = scan.expects, len(scan.open_brackets)  # before this character
        scan.take(char)
        if scan.is_broken or depth == 0:  # at depth 0 comes the opening brace
            return
        if depth > 1:  # within a value that is an object or a list
            if self._field in self.fields:  # the value is the arguments
                self._arguments.append(char)
        elif expected in ("string", "escape"):
            self._text.append(char)
            if scan.expects == "colon":  # the string has ended, and is a field's name
                self._field = json.loads("".join(self._text))
            elif scan.expects == "comma or end" and self._field == "name":  # it is the tool's name
                self.name = json.loads("".join(self._text))
                self._is_refused = self.name not in self.names
        elif char not in SPACE:
            if expected == "value":
                self._begin_value(char)
            elif expected in ("key", "key or end"):
                self._text = [char]

    def _begin_value(self, char: str) -> None:
        """Take the first character of a field's value. Refuse a name that is no string, arguments that are no
        object, and either of them if it comes a second time.
        """
        self._text = [char]
        if self._field in self.fields:
            if char != "{" or self._has_arguments:
                self._is_refused = True
            else:
                self._has_arguments = True
                self._arguments = [char]
        elif self._field == "name" and (char != '"' or self.name is not None):
            self._is_refused = True
