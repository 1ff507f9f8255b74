"""A choice as an automaton: which tokens may continue an output that must be one of several texts.
Extension B.

The state of an output is its bytes so far. An output may end where its bytes are a whole choice, even if that
choice is the beginning of another one.
"""

from collections.abc import Sequence

from engine.structured.matcher import Mask, StateMatcher
from engine.structured.vocabulary import Vocabulary


class Choice:
    """An `Automaton` of a list of texts. Any thread may use it."""

    first = b""

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary) -> None:
        self.choices = [text.encode() for text in choices]
        self.vocabulary = vocabulary

    def start(self) -> StateMatcher[bytes]:
        return StateMatcher(self)

    def remainders(self, output: bytes) -> list[bytes]:
        """The rest of each choice that begins with `output`; b"" for a choice that is equal to `output`."""
        return [choice[len(output) :] for choice in self.choices if choice.startswith(output)]

    def allowed(self, output: bytes) -> Mask:
        """The mask of the tokens that may come after `output`: those whose bytes are a beginning of the rest
        of some choice (`remainders`), or the whole rest. A token that goes on past the end of the choice may
        not come. If no choice has a rest, no token may come; constraint.py allows the tokens that end an
        output.

        `self.vocabulary.prefixes_of(text)` gives the ids of the tokens that are a beginning of `text`;
        `self.vocabulary.mask` makes a mask of token ids.
        """
        token_ids: list[int] = []
        for remainder in self.remainders(output):
            token_ids += self.vocabulary.prefixes_of(remainder)
        return self.vocabulary.mask(token_ids)

    def may_end(self, output: bytes) -> bool:
        return output in self.choices

    def after(self, output: bytes, token_id: int) -> bytes | None:
        """`output` with the token's bytes; None if no choice begins so, or if the token has no text."""
        token_bytes = self.vocabulary.tokens.get(token_id)
        if token_bytes is None or not self.remainders(output + token_bytes):
            return None
        return output + token_bytes
