"""The pieces of which an answer consists: thoughts, content, and calls of tools. Extension B.

A parser gets an answer's text as it comes and gives pieces. Joined by kind, they are the same however the
text was cut. Does not know of HTTP or JSON answers; tools.py makes those of the pieces.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

Kind = Literal["reasoning", "content", "call", "arguments", "broken"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    A `call` begins a call of the tool that `text` names; the pieces `arguments` behind it have the text of
    its arguments. `broken`: the last call's arguments went wrong; the text behind them follows as content.
    """

    kind: Kind
    text: str


class Parser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text`, the next part of the answer, makes certain."""

    def end(self) -> list[Piece]:
        """The pieces of what was held back, since the answer ends here."""


@dataclass
class Gathered:
    """Pieces that are gathered character by character, and taken together."""

    pieces: list[Piece] = field(default_factory=list)

    def give(self, kind: Kind, text: str) -> None:
        if text or kind == "broken":
            self.pieces.append(Piece(kind, text))

    def take(self) -> list[Piece]:
        """All pieces so far; neighbours of one kind are one."""
        taken: list[Piece] = []
        for kind, group in groupby(self.pieces, lambda piece: piece.kind):
            if kind in ("call", "broken"):
                taken += group
            else:
                taken.append(Piece(kind, "".join(piece.text for piece in group)))
        self.pieces.clear()
        return taken


class PlainText:
    """The parser of an answer that is all content."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def end(self) -> list[Piece]:
        return []


def num_held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`, which it does not have
    whole there.
    """
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
