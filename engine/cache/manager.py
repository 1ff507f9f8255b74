"""The two interfaces of a KV cache for many sequences: a plan on the host, and memory on the device. Part 6.

The plan decides which memory is whose: the scheduler asks it for memory, and each step's record gets from it
where keys and values lie. The memory holds them, and knows the record alone: so one plan serves one memory,
or one on each of several devices, or one for each of several models. Slots (Part 6) and pages (Part 12) are
such pairs.
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
        """Why it failed, if it did: then its keys and values may be wrong, and are not shared (Part 12)."""


@dataclass(frozen=True)
class Usage:
    """How full a cache is, in tokens."""

    num_sequences: int  # admitted
    tokens_held: int  # tokens reserved for sequences, used or not
    tokens_total: int

    @property
    def share(self) -> float:
        return self.tokens_held / self.tokens_total


@dataclass(slots=True)
class DraftProgress:
    """How much of a sequence a draft model has computed (Part 16). Its keys and values are in a memory of its
    own, in the blocks and slots that the plan gives the target's.
    """

    num_tokens: int  # the sequence's first tokens whose keys and values the draft model has computed
    guesses: list[int] = field(default_factory=list)  # its own tokens behind these: computed, not confirmed


class Locations(NamedTuple):
    """Where a step's sequences and new tokens lie: two fields of its `Batch`."""

    tables: np.ndarray  # [S, W]: each sequence's blocks (or slot) in order; 0 beyond its end
    slots: np.ndarray  # [T]: where each new token's keys and values go: block · P + offset in the block


class KVCacheManager(Protocol):
    """The plan: which memory is whose, by sequence. Knows no tensor."""

    draft_progress: dict[str, DraftProgress]  # by id of admitted sequences: `admit` adds an entry

    def admit(self, seq: CachedSequence) -> int | None:
        """Admit a sequence, and say how many of its first tokens are computed already: 0, or with a prefix
        cache up to all but one. None: there is no room now, and nothing has changed.
        """

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Make room for an admitted sequence's first `num_tokens` tokens. False: there is no room now, and
        nothing has changed.
        """

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """Note that an admitted sequence's first `num_tokens` tokens are known, and their keys and values
        computed: from here on they may be shared (Part 12). Never called for a step that failed, or that has
        not landed.
        """

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        """Free what an admitted sequence has reserved beyond `num_tokens` tokens (Part 16)."""

    def preempt(self, seq: CachedSequence) -> None:
        """Take a sequence's memory from it; it may be admitted again later. What was computed may be lost."""

    def release(self, seq: CachedSequence) -> None:
        """Free all that a finished sequence has. Does nothing for one that was never admitted."""

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of `num_tokens` tokens fits, if it has the cache for itself."""

    def usage(self) -> Usage:
        """How full it is."""

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        """Where the sequences of a step lie, up to their last new tokens, and where the new tokens go.

        ids[S]: admitted sequences, with room reserved. query_start[S+1]: sequence s has the new tokens
        query_start[s]:query_start[s+1] of positions[T].
        """

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies planned since the last step, for the next step's record: it makes them first."""

    def replan(self, copies: Sequence[Copy]) -> None:
        """Plan a failed step's copies again: the next step makes them before all that were planned since."""


class KVMemory(Protocol):
    """The memory: keys and values of one model, on one device. Knows no sequence beyond a step's record."""

    def apply(self, copies: Sequence[Copy]) -> None:
        """Make a step's copies, in order, each once."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step, which stores the batch's new keys and values and reads all of them."""
