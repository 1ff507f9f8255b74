"""A KV cache of one buffer, for one sequence at a time: Part 3's `SingleCache` behind the two interfaces of a
cache. Part 6.

A scheduler that runs one request after the other needs no more. Many sequences have slots (Part 7) or pages
(Part 12).
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, VarlenKernel
from engine.cache.manager import CachedSequence, DraftProgress, Locations, Usage
from engine.cache.single import SingleCache
from engine.models.config import ModelConfig
from engine.requests.batch import Batch, Copy


class BufferCache:
    """The plan: which sequence, if any, has the buffer of `max_tokens` tokens.

    Methods without a docstring are as in `KVCacheManager`.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.draft_progress: dict[str, DraftProgress] = {}
        self._holder: str | None = None  # the id of the sequence that has the buffer

    def admit(self, seq: CachedSequence) -> int | None:
        """Give the sequence the buffer. Returns 0, since no token of it is computed, or None if another
        sequence has the buffer.
        """
        if self._holder is not None:
            return None
        self._holder = seq.id
        self.draft_progress[seq.id] = DraftProgress(0)
        return 0

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        return num_tokens <= self.max_tokens

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        """Does nothing: no part of the buffer can be freed."""

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """Does nothing: there is no other sequence to share with."""

    def release(self, seq: CachedSequence) -> None:
        """Take the buffer from the sequence. Does nothing if it does not have it."""
        if self._holder == seq.id:
            self._holder = None
            del self.draft_progress[seq.id]

    preempt = release  # the sequence's keys and values are lost, and will be computed again

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self.max_tokens

    def usage(self) -> Usage:
        num_sequences = 0 if self._holder is None else 1
        return Usage(
            num_sequences=num_sequences,
            tokens_held=num_sequences * self.max_tokens,
            tokens_total=self.max_tokens,
        )

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        """The buffer is block 0, and a token lies at its position."""
        return Locations(np.zeros((len(ids), 1), dtype=np.int64), np.array(positions))

    def take_copies(self) -> tuple[Copy, ...]:
        return ()

    def replan(self, copies: Sequence[Copy]) -> None:
        """Does nothing: the buffer is never copied."""


class BufferMemory:
    """The memory: keys and values of one sequence of up to `max_tokens` tokens, allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: VarlenKernel = dense_attention,
    ) -> None:
        """`max_tokens` is the room of the buffer; None takes what the model's longest sequence needs."""
        if max_tokens is None:
            max_tokens = config.max_positions
        self._buffer = SingleCache(config, max_tokens, device, dtype, kernel)

    def plan(self) -> BufferCache:
        """A new plan of the buffer, in which it is free."""
        return BufferCache(self._buffer.max_tokens)

    def apply(self, copies: Sequence[Copy]) -> None:
        """Does nothing: the buffer is never copied."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of a step with one sequence. Its new tokens are stored from the position of the first
        one on, over what another sequence, or a step that failed, has left there.
        """
        self._buffer.length = batch.positions[0]  # the batch counts what is stored, so nobody calls `advance`
        return self._buffer.attend
