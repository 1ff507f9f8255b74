"""The logits that a request's bias and penalties change, kept up to date while the output grows. Part 5.

Promises that a new token costs the same time however long the output is: only the entry of this token
changes. Now and then the arrays are full, and are copied to longer ones.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.decoding.params import SamplingParams

BIAS, REPETITION, SUBTRACT = range(3)  # the columns of `factors`
NEUTRAL_FACTORS = (0, 1, 0)  # the factors that change nothing
START_LENGTH = 16  # the first capacity, in tokens; a full array doubles its capacity


class LogitChanges:
    """The changes of one request's logits: tokens[C] and factors[C, 3].

    The logit of tokens[c] is changed by factors[c] = (bias, repetition, subtract), as `adjust` (sampling.py)
    describes.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """The changes before the first token of the output."""
        self._params = params
        self._index: dict[int, int] = {}  # token -> c, the token's index in both arrays
        self._tokens = np.empty(START_LENGTH, np.int64)  # [capacity], of which C are used
        self._factors = np.empty((START_LENGTH, 3), np.float32)  # [capacity, 3]
        self._counts: Counter[int] = Counter()  # the occurrences of each token in the output so far
        self._num_counted = 0  # the number of output tokens that `_counts` has counted
        for token, bias in (params.logit_bias or {}).items():
            self._factors_of(token)[BIAS] = bias
        if params.repetition_penalty != 1:
            for token in prompt_ids:
                self._factors_of(token)[REPETITION] = params.repetition_penalty

    def for_output(
        self, output_ids: Sequence[int], drafts: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens[C], factors[C, 3]) for an output, which must begin with the output of the last call.

        `drafts` are counted as if they followed the output (Part 16). The next call does not count them.
        The arrays may be views, which the next call may change.
        """
        params = self._params
        if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1:
            for token in output_ids[self._num_counted :]:
                self._counts[token] += 1
                self._penalize(self._factors_of(token), self._counts[token])
            self._num_counted = len(output_ids)
            if drafts:
                return self._with_drafts(Counter(drafts))
        C = len(self._index)
        return self._tokens[:C], self._factors[:C]

    def _with_drafts(self, draft_counts: Counter[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the two arrays, as if each token of `draft_counts` followed the output as often as it
        counts. The arrays have an entry for each of these tokens, too.
        """
        C = len(self._index)
        new_tokens = [token for token in draft_counts if token not in self._index]
        new_index = {token: c for c, token in enumerate(new_tokens, start=C)}  # token -> c
        new_factors = np.full((len(new_tokens), 3), NEUTRAL_FACTORS, np.float32)
        tokens = np.concatenate([self._tokens[:C], np.array(new_tokens, np.int64)])
        factors = np.concatenate([self._factors[:C], new_factors])
        for token, count in draft_counts.items():
            c = new_index[token] if token in new_index else self._index[token]
            self._penalize(factors[c], self._counts[token] + count)
        return tokens, factors

    def _penalize(self, factors: np.ndarray, count: int) -> None:
        """Set the factors [3] of a token that is in the output `count` times."""
        params = self._params
        factors[REPETITION] = params.repetition_penalty
        if params.frequency_penalty or params.presence_penalty:
            factors[SUBTRACT] = params.frequency_penalty * count + params.presence_penalty

    def _factors_of(self, token: int) -> np.ndarray:
        """The factors [3] of a token: a view, to be changed in place. A new token has NEUTRAL_FACTORS."""
        if token not in self._index:
            c = len(self._index)
            if c == len(self._tokens):  # full
                self._tokens = np.resize(self._tokens, 2 * c)
                self._factors = np.resize(self._factors, (2 * c, 3))
            self._index[token] = c
            self._tokens[c] = token
            self._factors[c] = NEUTRAL_FACTORS
        return self._factors[self._index[token]]
