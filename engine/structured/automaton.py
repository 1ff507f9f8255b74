"""A regular expression as an automaton: first over bytes, then over tokens. Extension B.

A state says what is left to match. Over bytes, each byte leads to another state or nowhere. Over tokens, a
token leads where its bytes lead one by one, through states between that no output stands in: `"ab"` may span
the end of one part of the expression and the beginning of the next. States are made when somebody comes
there, and there are at most MAX_STATES of them.
"""

import threading

from engine.structured.derivative import NOTHING, Expression, derivative, matches_empty, size
from engine.structured.matcher import Mask, StateMatcher, StructureFailed
from engine.structured.vocabulary import TrieNode, Vocabulary

MAX_STATES = 2000
MAX_SIZE = 4000  # of what is left in one state


class ByteAutomaton:
    """The states of one expression, numbered as they are found. State 0 is the whole expression."""

    def __init__(self, expression: Expression) -> None:
        self._left = [expression]  # by state
        self._number = {expression: 0}  # the other way round
        self._next: list[dict[int, int | None]] = [{}]  # by state and byte, as far as it is known

    def after(self, state: int, byte: int) -> int | None:
        """The state behind one more byte; None if the byte does not fit. Raises StructureFailed."""
        known = self._next[state]
        if byte not in known:
            known[byte] = self._number_of(derivative(self._left[state], byte))
        return known[byte]

    def may_end(self, state: int) -> bool:
        """Whether what was read matches as it is."""
        return matches_empty(self._left[state])

    def _number_of(self, left: Expression) -> int | None:
        """The number of the state in which this is left, a new one if need be; None if nothing can match."""
        if left == NOTHING:
            return None
        if left not in self._number:
            if len(self._left) == MAX_STATES:
                raise StructureFailed(f"the regular expression needs more than {MAX_STATES} states")
            if size(left) > MAX_SIZE:
                raise StructureFailed("the regular expression grows too large as it is matched")
            self._number[left] = len(self._left)
            self._left.append(left)
            self._next.append({})
        return self._number[left]


class TokenAutomaton:
    """The same states with tokens for steps: an `Automaton` whose states are numbers."""

    first = 0

    def __init__(self, expression: Expression, vocabulary: Vocabulary) -> None:
        self.bytes, self.vocabulary = ByteAutomaton(expression), vocabulary
        self._masks: dict[int, Mask] = {}  # by state
        self._lock = threading.RLock()  # requests share the states, and threads compile and step

    def start(self) -> StateMatcher[int]:
        return StateMatcher(self)

    def may_end(self, state: int) -> bool:
        return self.bytes.may_end(state)

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind all bytes of one more token; None if one of them does not fit."""
        data = self.vocabulary.tokens.get(token_id)
        if data is None:
            return None
        with self._lock:
            for byte in data:
                there = self.bytes.after(state, byte)
                if there is None:
                    return None
                state = there
        return state

    def allowed(self, state: int) -> Mask:
        """The tokens all of whose bytes fit, one by one. Computed once for a state."""
        with self._lock:
            if state not in self._masks:
                self._masks[state] = self.vocabulary.mask(self.fitting(state))
            return self._masks[state]

    def fitting(self, state: int) -> list[int]:
        """The tokens that may come in a state, in any order: those whose bytes all fit, one by one, each in
        the state behind the byte before. A token need not complete a match, and two may have the same bytes.

        `vocabulary.root` is the tree of all tokens, `bytes.after` the step over one byte. Tokens that begin
        with the same bytes are tried together, each byte once: where one does not fit, none of the tokens
        behind it in the tree does.
        """
        fitting: list[int] = []
        places: list[tuple[TrieNode, int]] = [(self.vocabulary.root, state)]
        while places:
            node, here = places.pop()
            fitting += node.token_ids
            for byte, child in node.children.items():
                there = self.bytes.after(here, byte)
                if there is not None:
                    places.append((child, there))
        return fitting
