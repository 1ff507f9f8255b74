"""What one request's bias and penalties do to which tokens, kept up to date while its output grows. Part 5.

Promises that a new token costs the same however long the output is: only that token's entry changes.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.decoding.params import SamplingParams


class Changes:
    """Entry c says what happens to the logit of token `tokens[c]`: `factors[c]` is (bias, repetition,
    subtract).
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._entry: dict[int, int] = {}  # token -> c
        self._tokens = np.empty(16, np.int64)
        self._factors = np.empty((16, 3), np.float32)
        self._counts: Counter[int] = Counter()  # of the output tokens taken in
        self._taken_in = 0
        for token, bias in (params.logit_bias or {}).items():
            self._of(token)[0] = bias
        if params.repetition_penalty != 1:
            for token in prompt_ids:
                self._of(token)[1] = params.repetition_penalty

    def after(self, output_ids: Sequence[int], guesses: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3] once these are the output, which must begin with that of the last call;
        and as if `guesses` came behind it (Part 16), which the next call does not remember.
        """
        p = self._params
        if p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1:
            for token in output_ids[self._taken_in :]:
                self._counts[token] += 1
                self._penalise(self._of(token), self._counts[token])
            self._taken_in = len(output_ids)
            if guesses:
                return self._with(Counter(guesses))
        return self._tokens[: len(self._entry)], self._factors[: len(self._entry)]

    def _with(self, guessed: Counter[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copies, with so many more of these tokens."""
        C, new = len(self._entry), [token for token in guessed if token not in self._entry]
        tokens = np.concatenate([self._tokens[:C], np.array(new, np.int64)])
        factors = np.concatenate([self._factors[:C], np.tile(np.array([0, 1, 0], np.float32), (len(new), 1))])
        for token, more in guessed.items():
            c = self._entry[token] if token in self._entry else C + new.index(token)
            self._penalise(factors[c], self._counts[token] + more)
        return tokens, factors

    def _penalise(self, entry: np.ndarray, count: int) -> None:
        """factors[3] of a token that the output has so often."""
        p = self._params
        entry[1] = p.repetition_penalty
        if p.frequency_penalty or p.presence_penalty:
            entry[2] = p.frequency_penalty * count + p.presence_penalty

    def _of(self, token: int) -> np.ndarray:
        """factors[3] of the token, to be changed; a new one's do nothing yet."""
        if token not in self._entry:
            c = self._entry[token] = len(self._entry)
            if c == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * c)
                self._factors = np.resize(self._factors, (2 * c, 3))
            self._tokens[c], self._factors[c] = token, (0, 1, 0)
        return self._factors[self._entry[token]]
