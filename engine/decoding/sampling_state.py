"""What the choice of a token needs to know of its request: a state that grows with the output, and a frozen
record of it. Part 5.

A `SamplingState` follows the output of one request. A `Draw` is the frozen record of such a state, for the
record of a step (Part 6): it can be sent to another process. sampling.py chooses tokens by either (`Row`).
"""

import secrets
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from engine.decoding.bad_words import BadWords
from engine.decoding.params import SamplingParams
from engine.decoding.penalties import LogitChanges

NO_CHANGES = np.empty(0, np.int64), np.empty((0, 3), np.float32)  # tokens[C] and factors[C, 3] with C = 0


class Limits(NamedTuple):
    """The fields of SamplingParams, beside temperature and seed, that the choice of a row's token needs."""

    top_k: int
    top_p: float
    min_p: float
    min_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A record of everything that is needed to choose a token from one row of logits. It chooses nothing."""

    params: Limits
    temperature: float  # 0 is greedy
    seed: int
    names_seed: bool  # whether the request has chosen its seed (Part 16)
    is_adjusted: bool  # whether `adjust` may change the row
    stop_ids: tuple[int, ...] = ()  # tokens that may not be chosen before `min_tokens`
    tokens: np.ndarray | None = None  # [C]: the tokens whose logits change
    factors: np.ndarray | None = None  # [C, 3]: how the logits change, as in `SamplingState.changes`
    # [V / 32] in int32: bit v % 32 of number v // 32 says whether token v may be chosen at all. Numbers that
    # are missing at the end count as 0.
    mask: np.ndarray | None = None
    bad_ids: tuple[int, ...] = ()  # tokens that may not be chosen: each would complete a bad word

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3]. Only for a row with `is_adjusted`."""
        if self.tokens is None or self.factors is None:
            return NO_CHANGES
        return self.tokens, self.factors


class Row(Protocol):
    """What sampling.py needs to know of a row: a `SamplingState`, or a `Draw` that is made from one.

    `Draw` describes the members.
    """

    @property
    def params(self) -> SamplingParams | Limits: ...
    @property
    def temperature(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop_ids(self) -> Sequence[int]: ...
    @property
    def bad_ids(self) -> Sequence[int]: ...
    @property
    def mask(self) -> np.ndarray | None: ...
    @property
    def is_adjusted(self) -> bool: ...
    def changes(self) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(slots=True)
class SamplingState:
    """The state of one request's sampling, for the lifetime of the request."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # the request's own growing list, not a copy
    seed: int
    stop_ids: Sequence[int] = ()  # tokens that may not be chosen before `min_tokens`
    drafts: Sequence[int] = ()  # proposed tokens, counted as if they followed the output (Part 16)
    bad_words: BadWords | None = None
    mask: np.ndarray | None = None  # which tokens may be chosen, as in `Draw`
    temperature: float = field(init=False)  # 0 is greedy
    is_adjusted: bool = field(init=False)  # whether `adjust` may change the row
    _changes: LogitChanges = field(init=False)
    # The record with the fields that never change. If the row is not adjusted, it is all of `draw()`.
    lasting_draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.temperature = 1.0 if params.temperature is None else params.temperature
        self.is_adjusted = bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.frequency_penalty
            or params.presence_penalty
            or params.min_tokens
            or self.bad_words
            or self.mask is not None
        )
        self._changes = LogitChanges(params, self.prompt_ids)
        self.lasting_draw = Draw(
            params=Limits(params.top_k, params.top_p, params.min_p, params.min_tokens),
            temperature=self.temperature,
            seed=self.seed,
            names_seed=params.seed is not None,
            is_adjusted=self.is_adjusted,
            mask=self.mask,
        )

    @property
    def bad_ids(self) -> tuple[int, ...]:
        """The tokens that would complete a bad word now."""
        return self.bad_words.completing(self.output_ids, self.drafts) if self.bad_words else ()

    def draw(self) -> Draw:
        """A record of the present state, as a `Draw`. Later tokens do not change the record."""
        if not self.is_adjusted:
            return self.lasting_draw
        tokens, factors = self.changes()
        return replace(
            self.lasting_draw,
            stop_ids=tuple(self.stop_ids),
            tokens=tokens.copy(),
            factors=factors.copy(),
            bad_ids=self.bad_ids,
        )

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3]: the tokens whose logits bias and penalties change after the output so
        far, and the factors (bias, repetition, subtract) of each. The factors (0, 1, 0) change nothing.
        """
        return self._changes.for_output(self.output_ids, self.drafts)

    def with_drafts(self, drafts: Sequence[int]) -> "SamplingState":
        """A state as if these tokens followed the output.

        Both states share the counts of the output's tokens.
        """
        state = copy(self)
        state.drafts = drafts
        return state


def seed_of(params: SamplingParams) -> int:
    """The seed in `params`, or a random seed of 63 bits if it is None."""
    return secrets.randbits(63) if params.seed is None else params.seed


def allowed_mask(token_ids: Sequence[int] | None) -> np.ndarray | None:
    """The mask of a `Draw` that lets only `token_ids` be chosen, of which there is at least one. None for
    None, which allows all tokens.
    """
    if token_ids is None:
        return None
    num_words = max(token_ids) // 32 + 1  # numbers of 32 bits, up to the one with the largest token
    bits = np.zeros(num_words * 32, dtype=np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_by(mask: np.ndarray, V: int) -> np.ndarray:
    """bool[V]: which tokens the mask of a `Draw` lets be chosen."""
    return np.unpackbits(mask.view(np.uint8), count=V, bitorder="little").view(np.bool_)
