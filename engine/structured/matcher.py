"""The interfaces of structured output: what is compiled once, and what follows one output. Extension B.

A `Structure` is a constraint that was compiled for one vocabulary; all requests with the same constraint
share it. A `Matcher` follows one output of such a request, token by token, and says which tokens may come
next. Neither knows requests, steps, or the tokens that end an output: constraint.py does. Our own structures
are in choice.py and automaton.py; llguidance makes others (guidance.py).
"""

import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np

State = TypeVar("State", bound=Hashable)
Mask = np.ndarray  # int32[ceil(V / 32)]: bit v % 32 of number v // 32 says whether token v may come


class StructureFailed(Exception):
    """A matcher cannot go on, because the constraint needs more states or time than it may take."""


class Matcher(Protocol):
    """Follows one output. Only one thread at a time may use it."""

    def allowed(self) -> Mask:
        """The tokens with text that may come next, in an array that the caller may change. Raises
        StructureFailed.
        """

    def may_end(self) -> bool:
        """Whether the output fits as it is."""

    def advance(self, token_id: int) -> bool:
        """Take one more token. Returns False, and changes nothing, if the token does not fit. Raises
        StructureFailed.
        """

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    def copy(self) -> "Matcher":
        """Another matcher at the same place. Tokens so far cannot be taken back from it."""


class Structure(Protocol):
    """A constraint, compiled for one vocabulary. Any thread may use it."""

    def start(self) -> Matcher:
        """A new matcher, for an output without tokens."""


class StructureFromMatcher:
    """A structure whose outputs begin where a matcher stands: each output gets a copy of this matcher."""

    def __init__(self, matcher: Matcher) -> None:
        """`matcher` is not used elsewhere from now on."""
        self._matcher = matcher
        self._lock = threading.Lock()  # a matcher is copied by one thread at a time

    def start(self) -> Matcher:
        with self._lock:
            return self._matcher.copy()


class Automaton(Protocol[State]):
    """A structure in which a state says all that matters of an output so far."""

    @property
    def first(self) -> State:
        """The state of an output without tokens."""

    def allowed(self, state: State) -> Mask:
        """The tokens that may come in a state. Raises StructureFailed."""

    def may_end(self, state: State) -> bool:
        """Whether an output in this state fits as it is."""

    def after(self, state: State, token_id: int) -> State | None:
        """The state after one more token; None if the token does not fit. Raises StructureFailed."""


class StateMatcher(Generic[State]):
    """The `Matcher` of an `Automaton`. It keeps all states so far, so that tokens can be taken back."""

    def __init__(self, automaton: Automaton[State], state: State | None = None) -> None:
        """`state` is that of the output so far; None for an output without tokens."""
        self._automaton = automaton
        self._states = [automaton.first if state is None else state]

    def allowed(self) -> Mask:
        return self._automaton.allowed(self._states[-1]).copy()

    def may_end(self) -> bool:
        return self._automaton.may_end(self._states[-1])

    def advance(self, token_id: int) -> bool:
        state = self._automaton.after(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def rollback(self, count: int) -> None:
        if count:  # [-0:] would be the whole list
            del self._states[-count:]

    def copy(self) -> "StateMatcher[State]":
        return StateMatcher(self._automaton, self._states[-1])
