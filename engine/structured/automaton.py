"""A regular expression as an automaton: first over bytes, then over tokens. Extension B.

A state stands for what may still follow the text so far. Over bytes, a byte leads from one state to another,
or does not fit. Over tokens, a token leads through all states to which its bytes lead, one after the other.
So a token may begin in one part of the expression and end in the next.

Most states of an expression are never reached. So a state is made when a byte first leads to it. There are at
most MAX_STATES of them.
"""

import threading

from engine.structured.derivative import NOTHING, Expression, derivative, matches_empty, size
from engine.structured.matcher import Mask, StateMatcher, StructureFailed
from engine.structured.vocabulary import TrieNode, Vocabulary

MAX_STATES = 2000
MAX_SIZE = 4000  # the largest `size` of a state's expression


class ByteAutomaton:
    """The states of one expression, numbered in the order in which they are made. State 0 is the start.

    A state is an expression: the one that the rest of the text must match.
    """

    def __init__(self, expression: Expression) -> None:
        self._expressions = [expression]  # by state
        self._states = {expression: 0}  # by expression
        self._transitions: list[dict[int, int | None]] = [{}]  # by state and byte, as far as computed

    def after(self, state: int, byte: int) -> int | None:
        """The state after one more byte; None if the byte does not fit. Raises StructureFailed if the limits
        of states or of their size are exceeded.
        """
        transitions = self._transitions[state]
        if byte not in transitions:
            transitions[byte] = self._state_for(derivative(self._expressions[state], byte))
        return transitions[byte]

    def may_end(self, state: int) -> bool:
        """Whether a text that ends in this state matches the whole expression."""
        return matches_empty(self._expressions[state])

    def _state_for(self, expression: Expression) -> int | None:
        """The number of this expression's state, which is made if it is new; None if no text matches."""
        if expression == NOTHING:
            return None
        if expression not in self._states:
            if len(self._expressions) == MAX_STATES:
                raise StructureFailed(f"the regular expression needs more than {MAX_STATES} states")
            if size(expression) > MAX_SIZE:
                raise StructureFailed("the regular expression grows too large as it is matched")
            self._states[expression] = len(self._expressions)
            self._expressions.append(expression)
            self._transitions.append({})
        return self._states[expression]


class TokenAutomaton:
    """An `Automaton` with the states of a `ByteAutomaton`, in which each step is a token. Any thread may call
    its public methods.
    """

    first = 0

    def __init__(self, expression: Expression, vocabulary: Vocabulary) -> None:
        self.byte_automaton, self.vocabulary = ByteAutomaton(expression), vocabulary
        self._masks: dict[int, Mask] = {}  # by state
        # Requests share the states, and one thread may compile while another computes steps. Reentrant, so
        # that a `_fitting` that calls `after`, as a solution of the exercise may, does not wait for itself.
        self._lock = threading.RLock()

    def start(self) -> StateMatcher[int]:
        return StateMatcher(self)

    def may_end(self, state: int) -> bool:
        return self.byte_automaton.may_end(state)

    def after(self, state: int, token_id: int) -> int | None:
        """The state after all bytes of one more token; None if a byte does not fit, or if the token stands
        for no text. Raises StructureFailed as `ByteAutomaton.after` does.
        """
        token_bytes = self.vocabulary.tokens.get(token_id)
        if token_bytes is None:
            return None
        with self._lock:
            for byte in token_bytes:
                next_state = self.byte_automaton.after(state, byte)
                if next_state is None:
                    return None
                state = next_state
        return state

    def allowed(self, state: int) -> Mask:
        """The mask of the tokens that fit in a state (`_fitting`). Computed once for each state. Raises
        StructureFailed as `ByteAutomaton.after` does.
        """
        with self._lock:
            if state not in self._masks:
                self._masks[state] = self.vocabulary.mask(self._fitting(state))
            return self._masks[state]

    def _fitting(self, state: int) -> list[int]:
        """The ids of the tokens that may come in a state, in any order. A token may come if all of its bytes
        fit: the first in `state`, each other byte in the state after the byte before it. A token need not
        complete a match. Two tokens may have the same bytes.

        `self.vocabulary.root` is the tree of all tokens, and `self.byte_automaton.after` is the step over one
        byte. Tokens that begin with the same bytes are tried together: each byte of the tree is tried at most
        once. If a byte does not fit, no token below it in the tree fits.

        The caller holds the lock. Raises StructureFailed as `ByteAutomaton.after` does.
        """
        fitting: list[int] = []
        to_visit: list[tuple[TrieNode, int]] = [(self.vocabulary.root, state)]
        while to_visit:
            node, node_state = to_visit.pop()
            fitting += node.token_ids
            for byte, child in node.children.items():
                child_state = self.byte_automaton.after(node_state, byte)
                if child_state is not None:
                    to_visit.append((child, child_state))
        return fitting
