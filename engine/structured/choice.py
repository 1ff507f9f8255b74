"""A mask for a choice: which tokens may continue what was said. Extension B.

The state of an output is what it has said: its bytes. A token may come if it is a beginning of what some
choice has left. The output may end where it says a whole choice, even one that is the beginning of another.
"""

from collections.abc import Sequence

from engine.structured.matcher import Mask, StateMatcher
from engine.structured.vocabulary import Vocabulary


class Choice:
    """An `Automaton` of a list of texts."""

    first = b""

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary) -> None:
        self.choices = [text.encode() for text in choices]
        self.vocabulary = vocabulary

    def start(self) -> StateMatcher[bytes]:
        return StateMatcher(self)

    def left(self, said: bytes) -> list[bytes]:
        """What each choice that begins with `said` has left, b"" for a choice that was said."""
        return [choice[len(said) :] for choice in self.choices if choice.startswith(said)]

    def allowed(self, said: bytes) -> Mask:
        """The tokens that may come behind `said`, as a mask: all those that are a beginning of what some
        choice has left, or all of it. A token that goes on past the end of the choice is none of them. Where
        nothing is left, no token may come: constraint.py allows the one that ends an output.

        `Vocabulary.continuing` knows the tokens that are a beginning of some bytes, `Vocabulary.mask` makes a
        mask of token ids.
        """
        may_come = [id for rest in self.left(said) for id in self.vocabulary.continuing(rest)]
        return self.vocabulary.mask(may_come)

    def may_end(self, said: bytes) -> bool:
        return said in self.choices

    def after(self, said: bytes, token_id: int) -> bytes | None:
        """`said` and the token's bytes; None if no choice begins with them."""
        longer = said + self.vocabulary.tokens.get(token_id, b"")
        return longer if len(longer) > len(said) and self.left(longer) else None
