"""A KV cache of equal slots, one sequence each: simple, and wasteful for short sequences (Part 12 mends
that).

Promises that a sequence alone and the same sequence among others get the same attention. Takes the
mathematics as an argument: a varlen kernel. Part 6.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, Spans, VarlenKernel
from engine.attention.together import reads_only_its_own, together
from engine.batch import Batch
from engine.cache.manager import CachedSequence, Usage
from engine.config import ModelConfig
from engine.device import on_device


class SlotCache:
    """`num_slots` sequences of up to `slot_tokens` tokens each, allocated once."""

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
        self.keys, self.values = (tuple(layers) for layers in self._memory)  # views[N, Hkv, M, Dh], by layer
        self._config, self._kernel = config, kernel
        self._free = list(reversed(range(num_slots)))  # the lowest free slot is taken first
        self._slot: dict[str, int] = {}
        self._written = [0] * num_slots  # tokens of each slot that may hold something else than zeros

    def begin(self, seq: CachedSequence) -> int | None:
        if not self._free:
            return None
        self._slot[seq.id] = self._free.pop()
        return 0

    def reserve(self, seq: CachedSequence, total: int) -> bool:
        return total <= self.slot_tokens

    def commit(self, seq: CachedSequence, total: int) -> None:
        """Slots share nothing."""

    def release(self, seq: CachedSequence) -> None:
        slot = self._slot.pop(seq.id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort(reverse=True)
            if not reads_only_its_own(self._memory):
                self._memory[:, :, slot, :, : self._written[slot]] = 0  # a NaN would pass a neighbour's mask
            self._written[slot] = 0

    preempt = release  # what is given up is computed anew

    def fits(self, total: int) -> bool:
        return total <= self.slot_tokens

    def usage(self) -> Usage:
        return Usage(len(self._slot), len(self._slot) * self.slot_tokens, self.num_slots * self.slot_tokens)

    def attention(self, batch: Batch) -> Attend:
        """What is the same in every layer is worked out here, once a step; `attend` is called per layer."""
        H, M, Dh = self.keys[0].shape[1:]
        slots = [self._slot[request.id] for request in batch.requests]  # [S]
        for slot, n in zip(slots, batch.context_lens, strict=True):
            self._written[slot] = max(self._written[slot], n)
        # Where each new token's key goes, head by head, in one layer's keys seen as [N·Hkv·M, Dh].
        slot_of = np.repeat(slots, np.diff(batch.query_start))  # [T]
        row_of = (slot_of[:, None] * H + np.arange(H)) * M + np.array(batch.positions)[:, None]  # [T, Hkv]
        (row_of,) = on_device(self._memory.device, row_of.ravel())
        looks = self._looks(batch, slots)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # 1. Each new token's key and value go to its sequence's slot, at its position.
            self.keys[layer].view(-1, Dh).index_copy_(0, row_of, k.reshape(-1, Dh))
            self.values[layer].view(-1, Dh).index_copy_(0, row_of, v.reshape(-1, Dh))
            # 2. Each sequence's queries see its own keys.
            if len(looks) == 1:
                return looks[0][1](layer, q, k, v)
            out = torch.empty_like(q)  # [T, Hq, Dh]
            for rows, look in looks:
                out[rows] = look(layer, q[rows], k, v)
            return out

        return attend

    def _looks(self, batch: Batch, slots: list[int]) -> list[tuple[slice | Tensor, Attend]]:
        """The step in parts: some of its T rows, and how their queries meet their keys. Together all T rows.

        Tokens that come alone are attended together. Prompts read from their start need nothing but the keys
        just computed: neighbours share one call. Everyone else gets a call on a view of the slot.
        """
        parts, lens = list(pairwise(batch.query_start)), batch.context_lens
        single: list[int] = []
        whole: list[int] = []
        views: list[int] = []
        for s, (a, b) in enumerate(parts):
            (single if b - a == 1 else whole if b - a == lens[s] else views).append(s)
        if len(single) == 1:  # a plan for one costs more than a call
            views, single = [*views, *single], []
        looks: list[tuple[slice | Tensor, Attend]] = []
        if single:
            (rows,) = on_device(self._memory.device, [parts[s][0] for s in single])
            looks.append((rows, self._together([slots[s] for s in single], [lens[s] for s in single])))
        for _, run in groupby(enumerate(whole), key=lambda pair: pair[1] - pair[0]):
            neighbours = [s for _, s in run]
            starts = batch.query_start[neighbours[0] : neighbours[-1] + 2]
            looks.append((slice(starts[0], starts[-1]), self._new(starts)))
        for s in views:
            looks.append((slice(*parts[s]), self._view(slots[s], parts[s][1] - parts[s][0], lens[s])))
        return looks

    def _together(self, slots: list[int], lens: list[int]) -> Attend:
        plan = together(slots, lens, self._config.num_heads, self.keys[0])
        return lambda layer, q, k, v: plan(q, self.keys[layer], self.values[layer])

    def _new(self, query_start: Sequence[int]) -> Attend:
        starts = tuple(start - query_start[0] for start in query_start)
        rows, spans = slice(query_start[0], query_start[-1]), Spans(starts, starts)
        return lambda layer, q, k, v: self._kernel(q, k[rows], v[rows], spans)

    def _view(self, slot: int, num_queries: int, length: int) -> Attend:
        own = self._memory[:, :, slot, :, :length].transpose(2, 3)  # [2, L, n, Hkv, Dh]: nothing is copied
        keys, values = (tuple(layers) for layers in own)
        spans = Spans.of_one(num_queries, length)
        return lambda layer, q, k, v: self._kernel(q, keys[layer], values[layer], spans)
