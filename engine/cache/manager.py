"""What a KV cache of many sequences is: a plan on the host, and memory on the device. Part 6.

The plan decides whose memory is whose; the scheduler asks it, and it writes into each step's record where
keys and values lie. The memory holds them, and reads the record alone: so there may be one memory, or one on
each of several devices, or one for each of several models. Slots (Part 6) and pages (Part 12) are such pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.attention.interface import Attend
from engine.requests.batch import Batch, Copy


class CachedSequence(Protocol):
    """What a cache may know of a request."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def parent(self) -> "CachedSequence | None": ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def wants_every_row(self) -> bool: ...
    @property
    def error(self) -> str | None:
        """Why it failed: what it computed may be wrong (Part 12)."""


@dataclass(frozen=True)
class Usage:
    """How full a cache is, in tokens."""

    num_sequences: int
    tokens_held: int  # tokens reserved for sequences, used or not
    tokens_total: int

    @property
    def share(self) -> float:
        return self.tokens_held / self.tokens_total


@dataclass(slots=True)
class Drafted:
    """What a second model over the same places has of a sequence: a draft model, which reads along and says
    how far it is (Part 16).
    """

    num_tokens: int  # the sequence's first tokens whose keys it has
    guesses: list[int] = field(default_factory=list)  # its own behind these, whose keys lie there, too


class Places(NamedTuple):
    """Where a step's sequences lie: fields of its `Batch`."""

    tables: np.ndarray  # [S, W]
    slots: np.ndarray  # [T]


class KVCacheManager(Protocol):
    """The plan: which memory is whose, by sequence. Knows no tensor."""

    drafted: dict[str, Drafted]  # by admitted sequence; `begin` says what is there already

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

    def usage(self) -> Usage:
        """How full it is."""

    def places(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Places:
        """For a step of these admitted sequences: where each lies, up to its last new token, and where its
        new tokens go.

        ids[S]; query_start[S+1]: sequence s has the new tokens query_start[s]:query_start[s+1] of
        positions[T].
        """

    def take_copies(self) -> tuple[Copy, ...]:
        """All that have been planned since the last step: the next one makes them first."""

    def retry(self, copies: Sequence[Copy]) -> None:
        """A step failed: its copies come again with the next one, before all that were planned since."""


class KVMemory(Protocol):
    """The memory: keys and values of one model, on one device. Knows no sequence beyond a step's record."""

    def apply(self, copies: Sequence[Copy]) -> None:
        """Make a step's copies, in order, each once."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step, which stores the batch's new keys and values and reads all of them."""
