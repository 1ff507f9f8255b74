"""Reads a regular expression, as Python's `re` writes it, into an expression over bytes. Extension B.

The whole output matches, as with `re.fullmatch(…, re.ASCII)`: `\\d`, `\\w` and `\\s` are ASCII's, and `^` and
`$` may stand at the ends alone. What cannot be said with bytes one by one (look-around, references back, word
boundaries) is refused by name and place.
"""

from engine.structured.derivative import EMPTY, Expression, chain, either, repeat
from engine.structured.utf8 import LAST, Ranges, characters, others

MAX_DEPTH = 50  # groups in groups
MAX_REPEATS = 1000  # the largest number in {m,n}
DIGITS: Ranges = [(48, 57)]
WORD: Ranges = [*DIGITS, (65, 90), (95, 95), (97, 122)]
SPACES: Ranges = [(9, 13), (32, 32)]
CLASSES = {
    "d": DIGITS, "w": WORD, "s": SPACES, "D": others(DIGITS), "W": others(WORD), "S": others(SPACES),
}  # fmt: skip
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
HEX = {"x": 2, "u": 4, "U": 8}  # escapes with so many hexadecimal digits
ABSENT = {
    "?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind",
    "?P<": "a named group", "?P=": "a reference back", "?(": "a condition", "?>": "an atomic group",
    "?#": "a comment",
}  # fmt: skip


class RegexError(ValueError):
    """The text is no regular expression, or one that is not supported here."""


def parse(text: str) -> Expression:
    """The expression over bytes. Raises RegexError, which names the place."""
    reader = _Reader(text)
    expression = reader.options(0)
    if reader.place < len(text):
        reader.refuse("an opening bracket is missing")
    return expression


class _Reader:
    """Reads `text` from `place` on, one function for each kind of thing that may come next."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def refuse(self, why: str) -> None:
        shown = self.text[self.place : self.place + 20]
        raise RegexError(f"at character {self.place}, {shown!r}: {why}")

    def next(self, *accepted: str) -> str:
        """Step over the first of `accepted` that comes next, and return it; "" if none does."""
        for text in accepted:
            if self.text.startswith(text, self.place):
                self.place += len(text)
                return text
        return ""

    def character(self) -> str:
        """Step over one character."""
        if self.place == len(self.text):
            self.refuse("the expression ends too early")
        self.place += 1
        return self.text[self.place - 1]

    def options(self, depth: int) -> Expression:
        """`a|b|…`, up to a closing bracket or the end."""
        if depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} groups stand in each other")
        options = [self.row(depth)]
        while self.next("|"):
            options.append(self.row(depth))
        return either(*options)

    def row(self, depth: int) -> Expression:
        """Items one behind the other, each with how often it comes."""
        items: list[Expression] = []
        while self.place < len(self.text) and self.text[self.place] not in "|)":
            items.append(self.repeated(self.item(depth)))
        return chain(*items)

    def item(self, depth: int) -> Expression:
        """A group, a set, an escape, a dot, or a character."""
        start = self.place
        char = self.character()
        if char == "(":
            if not self.next("?:"):
                for sign, name in ABSENT.items():
                    if self.text.startswith(sign, self.place):
                        self.refuse(f"{name} is not supported")
                if self.text.startswith("?", self.place):
                    self.refuse("this group is not supported")
            group = self.options(depth + 1)
            if not self.next(")"):
                self.refuse("a closing bracket is missing")
            return group
        if char == "[":
            return characters(self.set())
        if char == "\\":
            return characters(self.escape())
        if char == ".":
            return characters(others([(10, 10)]))
        self.place = start
        if char in "*+?{":
            self.refuse("there is nothing to repeat")
        if char in "^$":
            is_at_end = start == (0 if char == "^" else len(self.text) - 1)
            if depth or not is_at_end:
                self.refuse("^ is accepted at the beginning and $ at the end: the whole output matches")
            self.place += 1
            return EMPTY
        self.place += 1
        return characters([(ord(char), ord(char))])

    def repeated(self, item: Expression) -> Expression:
        """The item, as often as what follows says."""
        start = self.place
        least, most = 1, None
        match self.next("*", "+", "?", "{"):
            case "*":
                least = 0
            case "+":
                pass
            case "?":
                least, most = 0, 1
            case "{":
                least, most = self.numbers()
            case _:
                return item
        self.next("?")  # as few as possible: the same texts match
        if self.text.startswith(("*", "+", "?", "{"), self.place):
            self.refuse("a repetition of a repetition is not supported: put the first in brackets")
        if (most is not None and most < least) or max(least, most or 0) > MAX_REPEATS:
            self.place = start
            self.refuse(f"{{m,n}} with m up to n, and n up to {MAX_REPEATS}, is accepted")
        return repeat(item, least, most)

    def numbers(self) -> tuple[int, int | None]:
        """`m}`, `m,}`, `,n}` or `m,n}`."""
        end = self.text.find("}", self.place)
        low, comma, high = self.text[self.place : max(end, self.place)].partition(",")
        digits = [number for number in (low, high) if number]
        if end < 0 or not digits or not all(n.isascii() and n.isdigit() and len(n) <= 9 for n in digits):
            self.refuse("a number of repetitions is expected, such as {2} or {2,5}")
        self.place = end + 1
        return int(low or 0), int(high) if high else None if comma else int(low)

    def set(self) -> Ranges:
        """The rest of `[…]` behind its opening bracket."""
        negated = bool(self.next("^"))
        ranges: Ranges = []
        while not ranges or not self.next("]"):
            low = self.member()
            is_range = (
                self.text.startswith("-", self.place) and self.text[self.place + 1 : self.place + 2] != "]"
            )
            if not is_range:
                ranges += low
                continue
            start, _ = self.place, self.next("-")
            high = self.member()
            ends = [*low, *high]
            if len(ends) != 2 or any(a != b for a, b in ends) or ends[0] > ends[1]:
                self.place = start
                self.refuse("a range from a character to a later one is expected")
            ranges.append((ends[0][0], ends[1][0]))
        return others(ranges) if negated else ranges

    def member(self) -> Ranges:
        """A character or an escape in a set."""
        char = self.character()
        if char == "\\":
            return [(8, 8)] if self.next("b") else self.escape()
        return [(ord(char), ord(char))]

    def escape(self) -> Ranges:
        """What comes behind a backslash."""
        start = self.place
        char = self.character()
        if char in CLASSES:
            return CLASSES[char]
        code = CONTROLS.get(char, ord(char))
        if char in HEX:
            digits = self.text[self.place : self.place + HEX[char]]
            self.place += len(digits)
            is_hex = len(digits) == HEX[char] and all(d in "0123456789abcdefABCDEF" for d in digits)
            if not is_hex or int(digits, 16) > LAST:
                self.place = start
                self.refuse(f"{HEX[char]} hexadecimal digits of a character are expected")
            code = int(digits, 16)
        elif char in "bBAZ" or char.isdigit():
            self.place = start
            self.refuse("word boundaries and references back are not supported")
        elif char.isascii() and char.isalpha() and char not in CONTROLS:
            self.place = start
            self.refuse("an escape of this letter is not supported")
        return [(code, code)]
