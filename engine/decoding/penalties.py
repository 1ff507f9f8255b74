"""What one request's bias and penalties do to which tokens, kept up to date while its output grows. Part 5.

Promises that a new token costs the same however long the output is: only that token's entry changes.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.decoding.params import SamplingParams

START_LENGTH = 16  # room for so many tokens at first; it doubles when it is full


class Changes:
    """tokens[C] and factors[C, 3]: the logit of `tokens[c]` is changed by `factors[c]`, (bias, repetition,
    subtract). Entries 0, 1 and 0 change nothing.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._index: dict[int, int] = {}  # token -> c, its index in both arrays
        self._tokens = np.empty(START_LENGTH, np.int64)  # both grow
        self._factors = np.empty((START_LENGTH, 3), np.float32)
        self._counts: Counter[int] = Counter()  # how often each token is in the output so far
        self._num_counted = 0  # of the output's tokens
        for token, bias in (params.logit_bias or {}).items():
            self._factors_of(token)[0] = bias
        if params.repetition_penalty != 1:
            for token in prompt_ids:
                self._factors_of(token)[1] = params.repetition_penalty

    def for_output(
        self, output_ids: Sequence[int], guesses: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3] for this output, which begins with that of the last call. `guesses` count
        as if they followed it (Part 16); the next call forgets them.
        """
        p = self._params
        if p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1:
            for token in output_ids[self._num_counted :]:
                self._counts[token] += 1
                self._penalise(self._factors_of(token), self._counts[token])
            self._num_counted = len(output_ids)
            if guesses:
                return self._with_guesses(Counter(guesses))
        C = len(self._index)
        return self._tokens[:C], self._factors[:C]

    def _with_guesses(self, guesses: Counter[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copies of tokens[C], factors[C, 3], as if each guess were in the output so many times more."""
        C = len(self._index)
        new_tokens = [token for token in guesses if token not in self._index]
        new_factors = np.tile(np.array([0, 1, 0], np.float32), (len(new_tokens), 1))  # [len(new_tokens), 3]
        tokens = np.concatenate([self._tokens[:C], np.array(new_tokens, np.int64)])
        factors = np.concatenate([self._factors[:C], new_factors])
        for token, count in guesses.items():
            c = self._index[token] if token in self._index else C + new_tokens.index(token)
            self._penalise(factors[c], self._counts[token] + count)
        return tokens, factors

    def _penalise(self, factors: np.ndarray, count: int) -> None:
        """Set factors[3] of a token that the output has so often."""
        p = self._params
        factors[1] = p.repetition_penalty
        if p.frequency_penalty or p.presence_penalty:
            factors[2] = p.frequency_penalty * count + p.presence_penalty

    def _factors_of(self, token: int) -> np.ndarray:
        """factors[3] of the token, to be changed in place; a new token's change nothing yet."""
        if token not in self._index:
            c = self._index[token] = len(self._index)
            if c == len(self._tokens):  # full
                self._tokens = np.resize(self._tokens, 2 * c)
                self._factors = np.resize(self._factors, (2 * c, 3))
            self._tokens[c], self._factors[c] = token, (0, 1, 0)
        return self._factors[self._index[token]]
