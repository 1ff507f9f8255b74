"""A KV cache of equal slots with one sequence each: simple, and wasteful for short sequences. Part 7.

A sequence gets the same attention alone and among others. The varlen kernel that computes attention is an
argument. Part 12's pages waste less memory.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.attention.slot_decode import combined_attend, plan_decode, supports_ragged
from engine.cache.manager import CachedSequence, DraftProgress, Locations, Usage
from engine.machine.device import on_device
from engine.models.config import ModelConfig
from engine.requests.batch import Batch, Copy


class SlotCache:
    """The plan: which of `num_slots` slots, of `slot_tokens` tokens each, belongs to which sequence. Methods
    without a docstring are as in `KVCacheManager`.
    """

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.num_slots, self.slot_tokens = num_slots, slot_tokens
        self.draft_progress: dict[str, DraftProgress] = {}
        self._free = list(reversed(range(num_slots)))  # the lowest free slot is taken first
        self.slot_of: dict[str, int] = {}  # by id of the admitted sequences

    def admit(self, seq: CachedSequence) -> int | None:
        """Take a free slot. Returns 0, since a new slot holds no token of the sequence, or None if no slot is
        free.
        """
        if not self._free:
            return None
        self.slot_of[seq.id] = self._free.pop()
        self.draft_progress[seq.id] = DraftProgress(0)
        return 0

    def reserve(self, seq: CachedSequence, num_tokens: int) -> bool:
        return num_tokens <= self.slot_tokens

    def trim(self, seq: CachedSequence, num_tokens: int) -> None:
        """Does nothing: no part of a slot can be freed."""

    def commit(self, seq: CachedSequence, num_tokens: int) -> None:
        """Does nothing: sequences in slots share no memory."""

    def release(self, seq: CachedSequence) -> None:
        """Free the sequence's slot. Does nothing for a sequence that has none."""
        slot = self.slot_of.pop(seq.id, None)
        self.draft_progress.pop(seq.id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort(reverse=True)

    preempt = release  # the sequence's keys and values are lost, and will be computed again

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self.slot_tokens

    def usage(self) -> Usage:
        num_taken = len(self.slot_of)
        return Usage(
            num_sequences=num_taken,
            tokens_held=num_taken * self.slot_tokens,
            tokens_total=self.num_slots * self.slot_tokens,
        )

    def locate(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Locations:
        slot = np.array([self.slot_of[seq_id] for seq_id in ids])  # [S]
        first_token = np.repeat(slot * self.slot_tokens, np.diff(query_start))  # [T]
        return Locations(slot[:, None], first_token + np.array(positions))

    def take_copies(self) -> tuple[Copy, ...]:
        return ()

    def replan(self, copies: Sequence[Copy]) -> None:
        """Does nothing: slots are never copied."""


class _BatchPart(NamedTuple):
    """One sequence of a batch: its slot, and which of the batch's T rows are its new tokens. The rows are
    first_row:end_row.
    """

    slot: int
    first_row: int
    end_row: int
    end: int  # the sequence's tokens in the cache after the step; the last `num_new` of them are new

    @property
    def num_new(self) -> int:
        """The number of the sequence's new tokens."""
        return self.end_row - self.first_row


class SlotMemory:
    """The memory: keys and values of `num_slots` sequences of up to `slot_tokens` tokens, allocated once.

    When a sequence begins in a slot, the keys and values of the last sequence there are set to zero, unless
    the attention reads a sequence's own tokens only.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        slot_tokens: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: VarlenKernel = dense_attention,
    ) -> None:
        """`slot_tokens` is the room of a slot; None takes what the model's longest sequence needs."""
        self.num_slots = num_slots
        self.slot_tokens = config.max_positions if slot_tokens is None else slot_tokens
        # Heads come before tokens, so that one head's keys are one matrix. The memory starts with zeros,
        # because a mask hides any number behind a sequence's end except a NaN.
        shape = (2, config.num_layers, num_slots, config.num_kv_heads, self.slot_tokens, config.head_dim)
        self._memory = torch.zeros(shape, device=device, dtype=dtype)  # [2, L, N, Hkv, M, Dh]
        keys, values = self._memory.unbind()  # [L, N, Hkv, M, Dh] each
        self.keys, self.values = keys.unbind(), values.unbind()  # by layer: [N, Hkv, M, Dh]
        self._num_heads, self._kernel = config.num_heads, kernel
        self._head_starts = np.arange(config.num_kv_heads) * self.slot_tokens  # [Hkv]: token rows in a slot
        self._written: dict[int, int] = {}  # by slot: how many of its first tokens may not be zero

    def plan(self) -> SlotCache:
        """A new plan of these slots, in which all are free."""
        return SlotCache(self.num_slots, self.slot_tokens)

    def apply(self, copies: Sequence[Copy]) -> None:
        """Does nothing: slots are never copied."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step. All that is the same in every layer is computed here, once.

        Prompts computed from their start share a call of the kernel with their neighbours (`_prompts`). Two
        or more sequences with one new token each are attended together (`_decode`). Each other sequence, also
        a lone one with one new token, gets a call of its own (`_one_sequence`).
        """
        # 1. Sort the sequences into decodes (one new token each), prompts computed from their start, in runs
        #    of neighbouring rows, and others.
        decodes: list[_BatchPart] = []
        prompt_runs: list[list[_BatchPart]] = []
        others: list[_BatchPart] = []
        slots = batch.tables[:, 0].tolist()  # [S]
        for s, slot in enumerate(slots):
            first_row, end_row = batch.query_start[s], batch.query_start[s + 1]
            end = batch.context_lens[s]
            part = _BatchPart(slot, first_row, end_row, end)
            self._clear(part)
            if part.num_new == 1:
                decodes.append(part)
            elif part.num_new < end:
                others.append(part)
            elif prompt_runs and prompt_runs[-1][-1].end_row == first_row:  # the last prompt's neighbour
                prompt_runs[-1].append(part)
            else:
                prompt_runs.append([part])
        if len(decodes) == 1:
            others += decodes  # for one sequence, a plan takes longer than a call of the kernel
        # 2. Make the attention of each group of rows.
        groups: list[tuple[slice | Tensor, Attend]] = []  # some of the T rows, and how they are attended
        if len(decodes) > 1:
            (row_index,) = on_device(self._memory.device, [part.first_row for part in decodes])
            groups.append((row_index, self._decode(decodes)))
        for run in prompt_runs:
            groups.append((slice(run[0].first_row, run[-1].end_row), self._prompts(run)))
        for part in others:
            groups.append((slice(part.first_row, part.end_row), self._one_sequence(part)))
        return combined_attend(groups)

    def _clear(self, part: _BatchPart) -> None:
        """Note how far this step writes. If a sequence begins in a slot, first set to zero what the slot's
        last sequence has written there: it may hold NaN, which a mask does not hide. Where attention needs no
        mask (`supports_ragged`), nothing is set to zero.
        """
        written = self._written.get(part.slot, 0)
        if part.num_new == part.end and written:
            if not supports_ragged(self._memory):
                self._memory[:, :, part.slot, :, :written] = 0
            written = 0
        self._written[part.slot] = max(part.end, written)

    def _one_sequence(self, part: _BatchPart) -> Attend:
        """Attention of one sequence. In each layer, the keys and values of its `num_new` new tokens are
        stored in its slot, at their positions; then its queries see the first `end` tokens of the slot. The
        kernel gets views of the slot, so nothing is copied.
        """
        slot = self._memory[:, :, part.slot, :, : part.end].transpose(2, 3)  # [2, L, end, Hkv, Dh]
        all_keys, all_values = slot.unbind()  # [L, end, Hkv, Dh] each
        first_new = part.end - part.num_new
        # By layer: all tokens, and the new ones.
        keys, values = all_keys.unbind(), all_values.unbind()
        new_keys, new_values = all_keys[:, first_new:].unbind(), all_values[:, first_new:].unbind()
        spans = Spans.of_one(part.num_new, part.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new_keys[layer].copy_(k)
            new_values[layer].copy_(v)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _prompts(self, parts: list[_BatchPart]) -> Attend:
        """Attention of prompts computed from their start. They see new keys only, so no slot is read."""
        store = self._store(parts)
        starts = tuple(accumulate((part.end for part in parts), initial=0))
        spans = Spans(starts, starts)  # queries and keys are the same tokens

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            return self._kernel(q, k, v, spans)

        return attend

    def _decode(self, parts: list[_BatchPart]) -> Attend:
        """Attention of several sequences with one new token each, in one call."""
        store = self._store(parts)
        slots, ends = [part.slot for part in parts], [part.end for part in parts]
        plan = plan_decode(slots, ends, self._num_heads, self.keys[0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            return plan(q, self.keys[layer], self.values[layer])

        return attend

    def _store(self, parts: list[_BatchPart]) -> Callable[[int, Tensor, Tensor], None]:
        """A function that stores one layer's k[T, Hkv, Dh] and v[T, Hkv, Dh] of the parts' T new tokens in
        their slots, at their positions.
        """
        _, Hkv, M, Dh = self.keys[0].shape
        # Where each head of each new token goes, in one layer's keys seen as [N·Hkv·M, Dh].
        first_head_rows: list[int] = []  # [T]
        for part in parts:
            slot_start = part.slot * Hkv * M
            first_head_rows += range(slot_start + part.end - part.num_new, slot_start + part.end)
        rows = (np.array(first_head_rows)[:, None] + self._head_starts).ravel()  # [T·Hkv]
        (index,) = on_device(self._memory.device, rows)

        def store(layer: int, k: Tensor, v: Tensor) -> None:
            self.keys[layer].view(-1, Dh).index_copy_(0, index, k.reshape(-1, Dh))
            self.values[layer].view(-1, Dh).index_copy_(0, index, v.reshape(-1, Dh))

        return store
