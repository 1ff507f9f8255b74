"""Two caches for two models, which hold the same sequences. Part 16.

Promises that a sequence is in both or in neither. What the draft model has computed lags behind the target:
`computed` says how far it is.
"""

from engine.attention.interface import Attend
from engine.batch import Batch
from engine.cache.manager import CachedSequence, KVCacheManager, Usage


class PairedCache:
    """The target's cache to all who ask, and the draft's beside it."""

    def __init__(self, target: KVCacheManager, draft: KVCacheManager) -> None:
        self.target, self.draft = target, draft
        self.computed: dict[str, int] = {}  # by sequence: tokens whose keys the draft's cache has

    def begin(self, seq: CachedSequence) -> int | None:
        there = self.target.begin(seq)
        if there is None:
            return None
        drafted = self.draft.begin(seq)
        if drafted is None:
            self.target.release(seq)
            return None
        self.computed[seq.id] = drafted
        return there

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        return self.target.reserve(seq, total) and self.draft.reserve(seq, total)

    def commit(self, seq: CachedSequence, total: int) -> None:
        self.target.commit(seq, total)
        self.draft.commit(seq, min(total, self.computed[seq.id]))

    def preempt(self, seq: CachedSequence) -> None:
        self.target.preempt(seq)
        self.draft.preempt(seq)
        self.computed.pop(seq.id, None)

    def release(self, seq: CachedSequence) -> None:
        self.target.release(seq)
        self.draft.release(seq)
        self.computed.pop(seq.id, None)

    def fits(self, total: int) -> bool:
        return self.target.fits(total) and self.draft.fits(total)

    def attention(self, batch: Batch) -> Attend:
        return self.target.attention(batch)

    def usage(self) -> Usage:
        """The target's: the draft's memory is spent with it."""
        return self.target.usage()
