"""What the scheduler and the model may ask of a KV cache of many sequences. Part 6.

The cache decides where keys and values live; slots (Part 6) and pages (Part 12) keep this promise.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.attention.interface import Attend
from engine.batch import Batch


class CachedSequence(Protocol):
    """What a cache may know of a request."""

    id: str
    token_ids: list[int]
    num_computed_tokens: int
    parent: "CachedSequence | None"
    adapter: str | None
    cache_salt: str | None
    wants_every_row: bool
    error: str | None  # why it failed: what it computed may be wrong (Part 12)


@dataclass(frozen=True)
class Usage:
    """How full a cache is, in tokens."""

    num_sequences: int
    tokens_held: int  # tokens reserved for sequences, used or not
    tokens_total: int

    @property
    def share(self) -> float:
        return self.tokens_held / self.tokens_total


class KVCacheManager(Protocol):
    """Memory for keys and values, by sequence."""

    def begin(self, seq: CachedSequence) -> int | None:
        """Admit a sequence. How many of its tokens are there already (0; with a prefix cache up to all but
        one), or None: no room now.
        """

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        """Make room for `total` tokens of an admitted sequence. False: no room now; nothing has changed."""

    def commit(self, seq: CachedSequence, total: int) -> None:
        """The keys and values of an admitted sequence's first `total` tokens are computed, and its tokens
        known: from here on they may be shared (Part 12). A step that failed, or that is still under way, is
        never committed.
        """

    def trim(self, seq: CachedSequence, total: int) -> None:
        """An admitted sequence needs room for `total` tokens, no more: what it reserved beyond may go to
        others (Part 16).
        """

    def preempt(self, seq: CachedSequence) -> None:
        """Give up a sequence's memory, to `begin` again later. What was computed may be lost."""

    def release(self, seq: CachedSequence) -> None:
        """The sequence is finished. Does nothing for one that was never admitted."""

    def fits(self, total: int) -> bool:
        """False: a sequence of `total` tokens will never fit, however long it waits."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step, which stores the batch's new keys and values and reads all of them."""

    def usage(self) -> Usage:
        """How full it is."""
