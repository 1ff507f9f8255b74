"""Reads a regular expression, as Python's `re` writes it, into an expression over bytes. Extension B.

The whole output must match, as with `re.fullmatch(…, re.ASCII)`. `\\d`, `\\w` and `\\s` stand for ASCII
characters only. `^` is accepted at the beginning, and `$` at the end. What an expression over bytes cannot
say (look-around, references back, word boundaries) is refused by name and position.
"""

from typing import NoReturn

from engine.structured.derivative import EMPTY, Expression, chain, either, repeat
from engine.structured.utf8 import LAST, Ranges, characters, complement

MAX_DEPTH = 50  # groups in groups
MAX_REPEATS = 1000  # the largest number in {m,n}
NEWLINE: Ranges = [(10, 10)]
DIGITS: Ranges = [(48, 57)]
WORD: Ranges = [*DIGITS, (65, 90), (95, 95), (97, 122)]
SPACES: Ranges = [(9, 13), (32, 32)]
# Escapes that stand for a set of characters, for a control character, and for a character by its number.
CLASSES = {
    "d": DIGITS, "w": WORD, "s": SPACES,
    "D": complement(DIGITS), "W": complement(WORD), "S": complement(SPACES),
}  # fmt: skip
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
BACKSPACE = 8  # what `\b` means in a set
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # escape -> how many hexadecimal digits follow
UNSUPPORTED_GROUPS = {
    "?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind",
    "?P<": "a named group", "?P=": "a reference back", "?(": "a condition", "?>": "an atomic group",
    "?#": "a comment",
}  # fmt: skip


class RegexError(ValueError):
    """The text is no regular expression, or one that is not supported here."""


def parse(text: str) -> Expression:
    """The expression over bytes. Raises RegexError, which names the position."""
    reader = _Reader(text)
    expression = reader.options(0)
    if reader.position < len(text):
        reader.refuse("an opening bracket is missing")
    return expression


class _Reader:
    """Reads `text` from `position` on. There is a method for each form that may come next: it steps over the
    form, and returns what the form stands for. Every method raises RegexError for what it does not accept.
    """

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def refuse(self, reason: str) -> NoReturn:
        """Raise RegexError with the position and the next characters."""
        shown = self.text[self.position : self.position + 20]
        raise RegexError(f"at character {self.position}, {shown!r}: {reason}")

    def refuse_at(self, position: int, reason: str) -> NoReturn:
        """As `refuse`, for an earlier position."""
        self.position = position
        self.refuse(reason)

    def accept(self, *texts: str) -> str:
        """Step over the first of `texts` that comes next, and return it; "" if none comes."""
        for text in texts:
            if self.text.startswith(text, self.position):
                self.position += len(text)
                return text
        return ""

    def character(self) -> str:
        """Step over one character, and return it."""
        if self.position == len(self.text):
            self.refuse("the expression ends too early")
        self.position += 1
        return self.text[self.position - 1]

    def options(self, depth: int) -> Expression:
        """`a|b|…`, up to a closing bracket or the end. `depth`: the number of groups around it."""
        if depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} groups stand in each other")
        options = [self.sequence(depth)]
        while self.accept("|"):
            options.append(self.sequence(depth))
        return either(*options)

    def sequence(self, depth: int) -> Expression:
        """Items one after the other, each with its repetition."""
        items: list[Expression] = []
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            items.append(self.repetition(self.item(depth)))
        return chain(*items)

    def item(self, depth: int) -> Expression:
        """A group, a set, an escape, a dot, `^` or `$`, or a character."""
        start = self.position
        char = self.character()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return characters(self.character_set())
        if char == "\\":
            return characters(self.escape())
        if char == ".":
            return characters(complement(NEWLINE))
        if char in "*+?{":
            self.refuse_at(start, "there is nothing to repeat")
        if char in "^$":
            accepted_position = 0 if char == "^" else len(self.text) - 1
            if depth or start != accepted_position:
                reason = "^ is accepted at the beginning and $ at the end: the whole output matches"
                self.refuse_at(start, reason)
            return EMPTY
        return characters([(ord(char), ord(char))])

    def group(self, depth: int) -> Expression:
        """The rest of `(…)` or `(?:…)` after its opening bracket."""
        if not self.accept("?:"):
            for sign, name in UNSUPPORTED_GROUPS.items():
                if self.text.startswith(sign, self.position):
                    self.refuse(f"{name} is not supported")
            if self.text.startswith("?", self.position):
                self.refuse("this group is not supported")
        options = self.options(depth + 1)
        if not self.accept(")"):
            self.refuse("a closing bracket is missing")
        return options

    def repetition(self, item: Expression) -> Expression:
        """The item, repeated as `*`, `+`, `?` or `{m,n}` says; the item itself if none of them follows."""
        start = self.position
        least: int
        most: int | None  # None: any number
        match self.accept("*", "+", "?", "{"):
            case "*":
                least, most = 0, None
            case "+":
                least, most = 1, None
            case "?":
                least, most = 0, 1
            case "{":
                least, most = self.counts()
            case _:
                return item
        self.accept("?")  # as few times as possible: a full match is the same
        if self.text.startswith(("*", "+", "?", "{"), self.position):
            self.refuse("a repetition of a repetition is not supported: put the first in brackets")
        is_backwards = most is not None and most < least
        largest = least if most is None else most
        if is_backwards or largest > MAX_REPEATS:
            self.refuse_at(start, f"{{m,n}} with m up to n, and n up to {MAX_REPEATS}, is accepted")
        return repeat(item, least, most)

    def counts(self) -> tuple[int, int | None]:
        """The rest of `{m}`, `{m,}`, `{,n}` or `{m,n}` after its opening brace: the least and the most. None
        as the most means any number.
        """
        end = self.text.find("}", self.position)
        content = self.text[self.position : end] if end >= 0 else ""
        low, comma, high = content.partition(",")
        given = [number for number in (low, high) if number]
        # Nine digits at most: MAX_REPEATS has fewer, and `int` refuses thousands of digits.
        are_numbers = all(number.isascii() and number.isdigit() and len(number) <= 9 for number in given)
        if not given or not are_numbers:
            self.refuse("a number of repetitions is expected, such as {2} or {2,5}")
        self.position = end + 1
        if not comma:
            return int(low), int(low)
        return int(low or 0), int(high) if high else None

    def character_set(self) -> Ranges:
        """The rest of `[…]` after its opening bracket."""
        is_negated = bool(self.accept("^"))
        ranges: Ranges = []
        while not ranges or not self.accept("]"):  # a bracket that comes first is a character of the set
            low = self.set_member()
            behind_minus = self.text[self.position + 1 : self.position + 2]
            is_range = self.text.startswith("-", self.position) and behind_minus != "]"
            if not is_range:
                ranges += low
                continue
            start = self.position
            self.accept("-")
            ranges.append(self.range_between(low, self.set_member(), start))
        return complement(ranges) if is_negated else ranges

    def range_between(self, low: Ranges, high: Ranges, start: int) -> tuple[int, int]:
        """The range `low-high` of a set. Refuses it, at the position `start` of its minus, if `low` or `high`
        is more than one character, or if they are in the wrong order.
        """
        first, last = _only_character(low), _only_character(high)
        if first is None or last is None or first > last:
            self.refuse_at(start, "a range from a character to a later one is expected")
        return first, last

    def set_member(self) -> Ranges:
        """A character or an escape in a set."""
        char = self.character()
        if char != "\\":
            return [(ord(char), ord(char))]
        if self.accept("b"):
            return [(BACKSPACE, BACKSPACE)]
        return self.escape()

    def escape(self) -> Ranges:
        """The rest of an escape after its backslash."""
        start = self.position
        char = self.character()
        if char in CLASSES:
            return CLASSES[char]
        if char in HEX_DIGITS:
            code = self.hexadecimal(char, start)
        elif char in CONTROLS:
            code = CONTROLS[char]
        else:
            if char in "bBAZ" or char.isdigit():
                self.refuse_at(start, "word boundaries and references back are not supported")
            if char.isascii() and char.isalpha():
                self.refuse_at(start, "an escape of this letter is not supported")
            code = ord(char)
        return [(code, code)]

    def hexadecimal(self, char: str, start: int) -> int:
        """The code point of an escape such as `\\x41`, after its letter `char`, which stands at `start`."""
        num_digits = HEX_DIGITS[char]
        digits = self.text[self.position : self.position + num_digits]
        self.position += len(digits)
        are_digits = len(digits) == num_digits and all(d in "0123456789abcdefABCDEF" for d in digits)
        if not are_digits or int(digits, 16) > LAST:
            self.refuse_at(start, f"{num_digits} hexadecimal digits of a character are expected")
        return int(digits, 16)


def _only_character(ranges: Ranges) -> int | None:
    """The code point of the character, if the ranges are only one; None if they are several."""
    if len(ranges) > 1:
        return None
    first, last = ranges[0]
    return first if first == last else None
