"""What one output must fit, and how far the output has come: the masks of its next rows. Extension B.

A `Matcher` does not know the tokens that end an output. This module adds them: such a token may come exactly
where the output fits as it is. If no other token fits there, only these tokens may come. After a token that
ends the output, only such tokens may come. So an output that goes on all the same (`ignore_eos`) keeps a text
that fits.
"""

from collections.abc import Sequence

import numpy as np

from engine.structured.matcher import Mask, Matcher, Structure, StructureFailed


class OutputConstraint:
    """The `Constraint` of one request (engine/requests/request.py). Only the thread that steps uses it."""

    def __init__(self, structure: Structure, eos_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """`eos_ids` are the tokens that end an output. `output_ids` is the request's list of output tokens,
        which grows from step to step.
        """
        self._structure = structure
        self._eos_ids = frozenset(eos_ids)
        self._output_ids = output_ids
        self._matcher: Matcher | None = None  # made when the first mask is asked for
        self._num_read = 0  # how many tokens of the output were taken so far
        self._num_ends = 0  # how many of the last taken tokens are in `eos_ids`
        # The length of a mask that has a bit for each of `eos_ids`; 0 if there are none.
        self._eos_words = max(self._eos_ids, default=-1) // 32 + 1
        self._failure: str | None = None  # why the constraint has failed; None if it has not

    @property
    def why_no_token(self) -> str:
        """Why a row may have allowed no token, for an error message."""
        if self._failure is not None:
            return f"structured_outputs: {self._failure}"
        return "no token fits structured_outputs that the other parameters allow"

    def masks(self, drafts: Sequence[int]) -> list[Mask]:
        """The masks of a step's rows: first of the row after the output so far, then of the row after each
        draft. If a draft does not fit, the row before it never chooses it, so later rows do not count: the
        masks end with the row before the first such draft.

        A constraint that has failed gives a mask that allows no token, so that only its request ends, with an
        error.
        """
        if self._failure is None:
            try:
                return self._masks_of_rows(drafts)
            except StructureFailed as error:
                self._failure = str(error)
        return [_no_tokens()]

    def _masks_of_rows(self, drafts: Sequence[int]) -> list[Mask]:
        """As `masks`. Raises StructureFailed if the constraint fails."""
        matcher = self._matcher_after_output()
        masks = [self._mask(matcher)]
        num_taken = 0
        for draft in drafts:
            if not self._take(matcher, draft):
                break
            num_taken += 1
            masks.append(self._mask(matcher))
        self._take_back(matcher, num_taken)  # drafts are not part of the output yet
        return masks

    def _matcher_after_output(self) -> Matcher:
        """The matcher after all tokens of the output. Raises StructureFailed if a token does not fit."""
        if self._matcher is None:
            self._matcher = self._structure.start()
        for token_id in self._output_ids[self._num_read :]:
            if not self._take(self._matcher, token_id):
                raise StructureFailed(f"token {token_id} of the output does not fit")
            self._num_read += 1
        return self._matcher

    def _take(self, matcher: Matcher, token_id: int) -> bool:
        """Take one more token. Returns whether it fits; if not, nothing changes."""
        if token_id in self._eos_ids:
            if not self._may_end(matcher):
                return False
            self._num_ends += 1
            return True
        if self._num_ends > 0:  # after a token that ends the output, no other fits
            return False
        return matcher.advance(token_id)

    def _take_back(self, matcher: Matcher, count: int) -> None:
        """Take back the last `count` tokens."""
        num_ends = min(count, self._num_ends)  # the matcher has not seen the tokens that end the output
        self._num_ends -= num_ends
        matcher.rollback(count - num_ends)

    def _may_end(self, matcher: Matcher) -> bool:
        """Whether a token that ends the output may come next."""
        return self._num_ends > 0 or matcher.may_end()

    def _mask(self, matcher: Matcher) -> Mask:
        """The tokens that may come next, those that end the output included."""
        allowed = matcher.allowed() if self._num_ends == 0 else _no_tokens()
        if len(allowed) < self._eos_words:
            allowed = np.concatenate([allowed, np.zeros(self._eos_words - len(allowed), np.int32)])
        # A view of `allowed`, without signs, since the highest bit is a token's bit.
        words = allowed.view(np.uint32)
        may_end = self._may_end(matcher)
        for token_id in self._eos_ids:
            bit = np.uint32(1 << token_id % 32)
            if may_end:
                words[token_id // 32] |= bit
            else:
                words[token_id // 32] &= ~bit
        return allowed


def _no_tokens() -> Mask:
    """A mask that allows no token."""
    return np.zeros(1, np.int32)


def intersection(mask: Mask, other: Mask | None) -> Mask:
    """The tokens that both masks allow. A mask does not allow tokens past its last bit; None allows all."""
    if other is None:
        return mask
    length = min(len(mask), len(other))
    return mask[:length] & other[:length]
