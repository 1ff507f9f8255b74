"""The two interfaces of a KV cache for many sequences: a plan on the host, and memory on the device. Part 6.

The plan decides which memory belongs to which sequence. The scheduler asks the plan for memory, and the plan
writes into each step's record where keys and values lie. The memory holds the keys and values, and knows the
record only. So one plan can serve one memory, a memory on each of several devices, or a memory for each of
several models. One buffer (Part 6), slots (Part 7), and pages (Part 12) are pairs of a plan and a memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.attention.interface import Attend
from engine.requests.batch import Batch, Copy


class CachedSequence(Protocol):
    """The attributes of a request that a cache may read."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def parent(self) -> "CachedSequence | None":
        """The sequence whose blocks this one may share: another sample of its prompt, or the beam that it
        continues.
        """

    @property
    def adapter(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None:
        """Sequences with different salts share no block."""

    @property
    def wants_every_row(self) -> bool:
        """Whether all logits of its prompt are needed (Part 10), so that no token of it can be shared."""

    @property
    def error(self) -> str | None:
        """Why the sequence failed; None if it did not. The keys and values of a failed sequence may be wrong,
        and are not shared (Part 12).
        """


@dataclass(frozen=True)
class Usage:
    """How full a cache is, in tokens."""

    num_sequences: int  # sequences that are admitted
    tokens_held: int  # tokens reserved for sequences, used or not
    tokens_total: int  # tokens for which the cache has room

    @property
    def share(self) -> float:
        """The share of the cache that is reserved, from 0 to 1."""
        return self.tokens_held / self.tokens_total


@dataclass(slots=True)
class DraftProgress:
    """How much of a sequence a draft model has computed (Part 16).

    The draft model has a memory of its own. Its keys and values lie there in the same blocks or slots as the
    target model's lie in the target's memory.
    """

    num_tokens: int  # how many of the sequence's first tokens the draft model has computed
    # Drafts that follow these tokens. The draft model has computed them, but they are not confirmed yet.
    drafts: list[int] = field(default_factory=list)


class Locations(NamedTuple):
    """Where the sequences and the new tokens of a step lie: two fields of the step's `Batch`."""

    tables: np.ndarray  # [S, W]: each sequence's blocks (or slot) in order; 0 beyond the sequence's end
    slots: np.ndarray  # [T]: where each new token's keys and values go: block · P + offset in the block


class KVCacheManager(Protocol):
    """The plan: which memory belongs to which sequence. Knows no tensor."""

    draft_progress: dict[str, DraftProgress]  # by id of the admitted sequences; `admit` adds an entry

    def admit(self, seq: CachedSequence) -> int | None:
        """Admit a sequence, and return how many of its first tokens are computed already: 0, or in pages up
        to all but one. Returns None, and changes nothing, if the sequence cannot be admitted now: there is no
        room, or its parent still computes tokens that both have in common (Part 12).
        """

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Make room for an admitted sequence's first `num_tokens` tokens. Returns False, and changes nothing,
        if there is no room now.
        """

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """Note that an admitted sequence's first `num_tokens` tokens are known, and that their keys and
        values are computed and may be shared from now on (Part 12). Must not be called for a step that has
        failed or has not landed.
        """

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        """Free the memory that an admitted sequence has reserved beyond its first `num_tokens` tokens (Part
        16), as far as it can be freed apart.
        """

    def preempt(self, seq: CachedSequence) -> None:
        """Free an admitted sequence's memory. The sequence may be admitted again later; its keys and values
        may be lost.
        """

    def release(self, seq: CachedSequence) -> None:
        """Free all memory of a finished sequence. Does nothing for a sequence that was never admitted."""

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits into the cache if no other sequence is there."""

    def usage(self) -> Usage:
        """How full the cache is."""

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        """Where the sequences of a step lie, up to their last new tokens, and where the new tokens go.

        `ids`[S] are admitted sequences with room reserved. `positions`[T] are those of the new tokens:
        sequence s has the new tokens query_start[s]:query_start[s+1], with query_start[S+1].
        """

    def take_copies(self) -> tuple[Copy, ...]:
        """Return the copies planned since the last call. The next step makes them before it computes."""

    def replan(self, copies: Sequence[Copy]) -> None:
        """Plan the copies of a failed step again. The next step makes them before all newer copies."""


class KVMemory(Protocol):
    """The memory: keys and values of one model, on one device. Knows no sequence beyond a step's record."""

    def apply(self, copies: Sequence[Copy]) -> None:
        """Make a step's copies, in order. A copy that was made before is left out."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step, which stores the batch's new keys and values and reads all of them."""
