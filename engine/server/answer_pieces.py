"""The pieces of which an answer consists: thoughts, content, and calls of tools. Extension B.

A parser gets an answer's text in parts, as the model writes it, and returns pieces. Pieces of one kind that
follow each other can be joined; the joined pieces do not depend on how the text was divided into parts. Knows
no HTTP and no JSON answers: answer_reader.py makes those from the pieces.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

Kind = Literal["reasoning", "content", "call", "arguments", "broken"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    - `reasoning` and `content`: `text` is text of the thoughts, or of the answer itself.
    - `call`: a call of the tool whose name is `text` begins.
    - `arguments`: `text` belongs to the arguments of the last call.
    - `broken`: the arguments of the last call are not a JSON object, and no more of them follow. `text` is
      empty, and the rest of the answer's text follows as content.
    """

    kind: Kind
    text: str


class Parser(Protocol):
    """Reads one answer. A parser holds text back while it cannot tell to which kind of piece it belongs."""

    def feed(self, text: str) -> list[Piece]:
        """Read the next part of the answer. Returns the pieces that are certain now."""

    def end(self) -> list[Piece]:
        """Tell the parser that the answer has ended. Returns the pieces of the text that was held back."""


@dataclass
class PieceCollector:
    """Collects pieces character by character, and joins them."""

    pieces: list[Piece] = field(default_factory=list)

    def add(self, kind: Kind, text: str) -> None:
        """Add a piece. An empty text is left out, except for `broken`, which has no text."""
        if text or kind == "broken":
            self.pieces.append(Piece(kind, text))

    def take_all(self) -> list[Piece]:
        """Remove and return all pieces. Neighbours of one kind are joined, except calls."""
        joined: list[Piece] = []
        for kind, group in groupby(self.pieces, lambda piece: piece.kind):
            if kind in ("call", "broken"):
                joined += group
            else:
                joined.append(Piece(kind, "".join(piece.text for piece in group)))
        self.pieces.clear()
        return joined


class PlainText:
    """The parser of an answer that is all content."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def end(self) -> list[Piece]:
        return []


def num_held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`, which is incomplete there."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
