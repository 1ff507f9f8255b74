"""What one output must fit, and how far it has come: the masks of its next rows. Extension B.

Adds to a `Matcher` what it does not know: the tokens that end an output. Such a token may come exactly where
the output fits as it is, and where nothing else fits it is the one that may come. Behind it comes nothing but
itself: an output that goes on all the same (`ignore_eos`) keeps a text that fits.
"""

from collections.abc import Sequence

import numpy as np

from engine.structured.matcher import Mask, Matcher, Structure, StructureFailed

NOTHING = np.zeros(1, np.int32)  # a mask that allows no token


class Constraint:
    """The constraint of one request. Only the thread that steps uses it."""

    def __init__(self, structure: Structure, eos_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """`eos_ids` are the tokens that end an output. `output_ids` is the request's own growing list."""
        self._structure, self._eos_ids, self._output_ids = structure, frozenset(eos_ids), output_ids
        self._matcher: Matcher | None = None  # none before the first row is asked for
        self._num_read = 0  # tokens of the output that were taken
        self._num_ends = 0  # tokens at its end that end it
        self._error = ""

    @property
    def why_no_token(self) -> str:
        """Why a row may have allowed no token, for an error message."""
        return self._error or "no token fits structured_outputs that the other parameters allow"

    def masks(self, drafts: Sequence[int]) -> list[Mask]:
        """The mask of the row behind the output so far, and of the row behind each draft that fits with those
        before it. A row behind a draft that does not fit has none: the row before never chooses that draft.

        A constraint that has failed allows no token, so that its request alone ends, with an error.
        """
        masks: list[Mask] = []
        try:
            matcher = self._caught_up()
            masks.append(self._mask(matcher))
            num_taken = 0
            for draft in drafts:
                if not self._take(matcher, draft):
                    break
                num_taken += 1
                masks.append(self._mask(matcher))
            self._take_back(matcher, num_taken)
        except StructureFailed as error:
            self._error = f"structured_outputs: {error}"
        return [NOTHING] if self._error else masks

    def _caught_up(self) -> Matcher:
        """The matcher, behind all tokens of the output. Raises StructureFailed if one of them does not fit,
        or if the constraint has failed before.
        """
        if self._error:
            raise StructureFailed(self._error.removeprefix("structured_outputs: "))
        if self._matcher is None:
            self._matcher = self._structure.start()
        for token_id in self._output_ids[self._num_read :]:
            if not self._take(self._matcher, token_id):
                raise StructureFailed(f"token {token_id} of the output does not fit")
            self._num_read += 1
        return self._matcher

    def _take(self, matcher: Matcher, token_id: int) -> bool:
        """Take one more token. Returns whether it fits."""
        if token_id in self._eos_ids:
            fits = bool(self._num_ends) or matcher.may_end()
            self._num_ends += fits
            return fits
        return not self._num_ends and matcher.advance(token_id)

    def _take_back(self, matcher: Matcher, count: int) -> None:
        """Take back the last `count` tokens."""
        num_ends = min(count, self._num_ends)
        self._num_ends -= num_ends
        matcher.rollback(count - num_ends)

    def _mask(self, matcher: Matcher) -> Mask:
        """The tokens that may come next, those that end the output included."""
        may_end = bool(self._num_ends) or matcher.may_end()
        allowed = NOTHING.copy() if self._num_ends else matcher.allowed()
        num_words = max(self._eos_ids) // 32 + 1
        if len(allowed) < num_words:
            allowed = np.concatenate([allowed, np.zeros(num_words - len(allowed), np.int32)])
        bits = allowed.view(np.uint32)
        for token_id in self._eos_ids:
            bit = np.uint32(1 << token_id % 32)
            bits[token_id // 32] = bits[token_id // 32] | bit if may_end else bits[token_id // 32] & ~bit
        return allowed


def both(mask: Mask, other: Mask | None) -> Mask:
    """The tokens that both masks allow. A mask allows no token that it has no bit for; None allows all."""
    if other is None:
        return mask
    length = min(len(mask), len(other))
    return mask[:length] & other[:length]
