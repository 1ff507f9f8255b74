"""A KV cache of equal slots, one sequence each: simple, and wasteful for short sequences (Part 12 mends
that).

Promises that a sequence alone and the same sequence among others get the same attention. Takes the
mathematics as an argument: a varlen kernel. Part 6.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.attention.slot_decode import combined_attend, plan_decode, supports_ragged
from engine.cache.manager import CachedSequence, Drafted, Places, Usage
from engine.machine.device import on_device
from engine.models.config import ModelConfig
from engine.requests.batch import Batch, Copy


class SlotCache:
    """The plan: which of `num_slots` slots of `slot_tokens` tokens is whose."""

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.num_slots, self.slot_tokens = num_slots, slot_tokens
        self.drafted: dict[str, Drafted] = {}
        self._free = list(reversed(range(num_slots)))  # the lowest free slot is taken first
        self._slot: dict[str, int] = {}

    def begin(self, seq: CachedSequence) -> int | None:
        """A free slot, in which nothing of the sequence is there yet. None: all are taken."""
        if not self._free:
            return None
        self._slot[seq.id] = self._free.pop()
        self.drafted[seq.id] = Drafted(0)
        return 0

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        return total <= self.slot_tokens

    def trim(self, seq: CachedSequence, total: int) -> None:
        pass  # a slot is whole

    def commit(self, seq: CachedSequence, total: int) -> None:
        """Slots share nothing."""

    def release(self, seq: CachedSequence) -> None:
        """Its slot is free. Does nothing for a sequence that has none."""
        slot = self._slot.pop(seq.id, None)
        self.drafted.pop(seq.id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort(reverse=True)

    preempt = release  # what is given up is computed anew

    def fits(self, total: int) -> bool:
        return total <= self.slot_tokens

    def usage(self) -> Usage:
        return Usage(len(self._slot), len(self._slot) * self.slot_tokens, self.num_slots * self.slot_tokens)

    def places(self, ids: Sequence[str], query_start: Sequence[int], positions: Sequence[int]) -> Places:
        slot = np.array([self._slot[name] for name in ids])  # [S]
        first_token = np.repeat(slot * self.slot_tokens, np.diff(query_start))  # [T]
        return Places(slot[:, None], first_token + np.array(positions))

    def take_copies(self) -> tuple[Copy, ...]:
        return ()

    def retry(self, copies: Sequence[Copy]) -> None:
        """Slots are never copied."""


class SlotMemory:
    """The memory: `num_slots` sequences of up to `slot_tokens` tokens each, allocated once.

    What a sequence left behind is cleared, when another begins there, wherever a mask might let it through.
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
        self.num_slots, self.slot_tokens = num_slots, slot_tokens or config.max_positions
        # Heads before tokens, so that one head's keys are one matrix. Zeros: a mask hides any number behind a
        # sequence's end, but not a NaN.
        shape = (2, config.num_layers, num_slots, config.num_kv_heads, self.slot_tokens, config.head_dim)
        self._memory = torch.zeros(shape, device=device, dtype=dtype)  # [2, L, N, Hkv, M, Dh]
        self.keys, self.values = (layers.unbind() for layers in self._memory)  # by layer: [N, Hkv, M, Dh]
        self._num_heads, self._kernel = config.num_heads, kernel
        self._head = np.arange(config.num_kv_heads) * self.slot_tokens  # [Hkv]: where each begins in a slot
        self._written: dict[int, int] = {}  # slot -> tokens of it that may be something else than zero

    def plan(self) -> SlotCache:
        """Who has which of these slots: nobody has one yet."""
        return SlotCache(self.num_slots, self.slot_tokens)

    def apply(self, copies: Sequence[Copy]) -> None:
        """Slots are never copied."""

    def attention(self, batch: Batch) -> Attend:
        """The `attend` of one step. What is the same in every layer is worked out here, once.

        Prompts read from their start share a call of the kernel with their neighbours (`_whole`). Two or more
        sequences with one new token each are attended together (`_together`). Anyone else, also a single
        token with nobody like it, gets a call of its own (`_alone`).
        """
        single: list[_Part] = []
        prompts: list[list[_Part]] = []  # read from their start, neighbours together
        others: list[_Part] = []
        rows_of = pairwise(batch.query_start)
        for slot, rows, end in zip(batch.tables[:, 0].tolist(), rows_of, batch.context_lens, strict=True):
            part = _Part(slot, *rows, end)
            self._clear(part)
            if part.num_new == 1:
                single.append(part)
            elif part.num_new < end:
                others.append(part)
            elif prompts and prompts[-1][-1].last_row == part.first_row:
                prompts[-1].append(part)
            else:
                prompts.append([part])
        if len(single) == 1:
            others += single  # a plan for one costs more than a call
        looks: list[tuple[slice | Tensor, Attend]] = []  # some of the T rows, and how they are attended
        if len(single) > 1:
            (places,) = on_device(self._memory.device, [part.first_row for part in single])
            looks.append((places, self._together(single)))
        looks += [(slice(run[0].first_row, run[-1].last_row), self._whole(run)) for run in prompts]
        looks += [(slice(part.first_row, part.last_row), self._alone(part)) for part in others]
        return combined_attend(looks)

    def _clear(self, part: "_Part") -> None:
        """Who begins in a slot finds it as if nobody had been there: a NaN would pass a mask."""
        written = self._written.get(part.slot, 0)
        if part.num_new == part.end and written:
            if not supports_ragged(self._memory):
                self._memory[:, :, part.slot, :, :written] = 0
            written = 0
        self._written[part.slot] = max(part.end, written)

    def _alone(self, part: "_Part") -> Attend:
        """One sequence. The keys and values of its `num_new` new tokens are stored in its slot, at their
        positions, in the layer at hand; then its queries see the first `end` places of that layer. The kernel
        reads views of the slot, which copy nothing.
        """
        own = self._memory[:, :, part.slot, :, : part.end].transpose(2, 3)  # [2, L, end, Hkv, Dh]
        new_keys, new_values = (layers.unbind() for layers in own[:, :, part.end - part.num_new :])
        keys, values = (layers.unbind() for layers in own)
        spans = Spans.of_one(part.num_new, part.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new_keys[layer].copy_(k)
            new_values[layer].copy_(v)
            return self._kernel(q, keys[layer], values[layer], spans)

        return attend

    def _whole(self, parts: "list[_Part]") -> Attend:
        """Prompts from their start: all they see was computed just now, so the slots need not be read."""
        store, starts = self._store(parts), tuple(accumulate((part.end for part in parts), initial=0))
        spans = Spans(starts, starts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            return self._kernel(q, k, v, spans)

        return attend

    def _together(self, parts: "list[_Part]") -> Attend:
        """One new token each: everybody's attention in one go."""
        store = self._store(parts)
        slots, ends = [part.slot for part in parts], [part.end for part in parts]
        plan = plan_decode(slots, ends, self._num_heads, self.keys[0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store(layer, k, v)
            return plan(q, self.keys[layer], self.values[layer])

        return attend

    def _store(self, parts: "list[_Part]") -> Callable[[int, Tensor, Tensor], None]:
        """Puts new keys and values into their sequences' slots, at their positions."""
        _, Hkv, M, Dh = self.keys[0].shape
        tokens = [p.slot * Hkv * M + i for p in parts for i in range(p.end - p.num_new, p.end)]
        # Where each head of each new token goes, in one layer's keys seen as [N·Hkv·M, Dh].
        rows = (np.array(tokens)[:, None] + self._head).ravel()  # [T·Hkv]
        (row_of,) = on_device(self._memory.device, rows)

        def store(layer: int, k: Tensor, v: Tensor) -> None:
            self.keys[layer].view(-1, Dh).index_copy_(0, row_of, k.reshape(-1, Dh))
            self.values[layer].view(-1, Dh).index_copy_(0, row_of, v.reshape(-1, Dh))

        return store


class _Part(NamedTuple):
    """A sequence's share of a step."""

    slot: int
    first_row: int
    last_row: int  # of the step's T rows; exclusive
    end: int  # its tokens in the cache when the step is done: the last num_new of them are new

    @property
    def num_new(self) -> int:
        return self.last_row - self.first_row
