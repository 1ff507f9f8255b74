"""Two caches for two models, which hold the same sequences. Part 16.

Promises that a sequence is in both or in neither, and that the draft's cache never passes on keys of tokens
that did not stand. What the draft model has read lags behind the target: `read` says how far it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.attention.interface import Attend
from engine.batch import Batch
from engine.cache.manager import CachedSequence, KVCacheManager, Usage


@dataclass(frozen=True)
class _Reader:
    """A sequence as the draft's cache sees it when it begins. No parent: what that has read so far is no
    reason to wait. And no row's logits are asked of the draft.
    """

    id: str
    token_ids: Sequence[int]
    adapter: str | None
    cache_salt: str | None
    num_computed_tokens: int = 0
    parent: None = None
    wants_every_row: bool = False
    error: None = None


class PairedCache:
    """The target's cache to all who ask, and the draft's beside it."""

    def __init__(self, target: KVCacheManager, draft: KVCacheManager) -> None:
        self.target, self.draft = target, draft
        self.read: dict[str, int] = {}  # by sequence: its first tokens whose keys the draft's cache has
        self.guessed: dict[str, list[int]] = {}  # and its own guesses behind them, whose keys lie there, too

    def begin(self, seq: CachedSequence) -> int | None:
        there = self.target.begin(seq)
        if there is None:
            return None
        drafted = self.draft.begin(_Reader(seq.id, seq.token_ids, seq.adapter, seq.cache_salt))
        if drafted is None:
            self.target.preempt(seq)  # it will begin again
            return None
        self.read[seq.id], self.guessed[seq.id] = drafted, []
        return there

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        """False: no room now in one of them. What the target found before the draft refused stays the
        sequence's own, for the next time it asks, or until `trim`.
        """
        return self.target.reserve(seq, total) and self.draft.reserve(seq, total)

    def commit(self, seq: CachedSequence, total: int) -> None:
        self.target.commit(seq, total)
        self.draft.commit(seq, min(total, self.read[seq.id]))

    def trim(self, seq: CachedSequence, total: int) -> None:
        self.target.trim(seq, total)
        self.draft.trim(seq, total)

    def preempt(self, seq: CachedSequence) -> None:
        self.target.preempt(seq)
        self.draft.preempt(seq)
        self._forget(seq)

    def release(self, seq: CachedSequence) -> None:
        self.target.release(seq)
        self.draft.release(seq)
        self._forget(seq)

    def _forget(self, seq: CachedSequence) -> None:
        self.read.pop(seq.id, None)
        self.guessed.pop(seq.id, None)

    def fits(self, total: int) -> bool:
        return self.target.fits(total) and self.draft.fits(total)

    def attention(self, batch: Batch) -> Attend:
        return self.target.attention(batch)

    def usage(self) -> Usage:
        """The target's: the draft's memory is spent with it."""
        return self.target.usage()
