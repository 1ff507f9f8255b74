"""A KV cache of equal slots, one sequence each: simple, and wasteful for short sequences (Part 12 mends
that).

Promises that a sequence alone and the same sequence among others get the same attention. Takes the
mathematics as an argument: a varlen kernel. Part 6.
"""

from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Attend, VarlenKernel
from engine.attention.together import reads_only_its_own, together
from engine.batch import Batch
from engine.cache.manager import CachedSequence, Usage
from engine.config import ModelConfig


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
        # [N, Hkv, M, Dh] per layer: heads before tokens, so that one head's keys are one matrix
        shape = (num_slots, config.num_kv_heads, self.slot_tokens, config.head_dim)
        # Zeros: a mask hides any number behind a sequence's end, but not a NaN.
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._config, self._device, self._kernel = config, device, kernel
        self._free = list(reversed(range(num_slots)))  # the lowest free slot is taken first
        self._slot: dict[str, int] = {}

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
            if not reads_only_its_own(self.keys[0]):
                for tensor in (*self.keys, *self.values):
                    tensor[slot, :, : len(seq.token_ids)] = 0  # a NaN left here would pass a neighbour's mask

    preempt = release  # what is given up is computed anew

    def fits(self, total: int) -> bool:
        return total <= self.slot_tokens

    def usage(self) -> Usage:
        return Usage(len(self._slot), len(self._slot) * self.slot_tokens, self.num_slots * self.slot_tokens)

    def attention(self, batch: Batch) -> Attend:
        slots = [self._slot[request.id] for request in batch.requests]  # [S]
        spans = list(pairwise(batch.query_start))  # [S]
        H, M, Dh = self.keys[0].shape[1:]
        # Where each new token's key goes, head by head, in one layer's keys seen as [N·Hkv·M, Dh].
        slot_of = torch.tensor([slots[s] for s, (a, b) in enumerate(spans) for _ in range(b - a)])  # [T]
        row_of = (slot_of[:, None] * H + torch.arange(H)) * M + torch.tensor(batch.positions)[:, None]
        row_of = row_of.flatten().to(self._device)  # [T·Hkv]
        # Sequences with one new token are decoded together; a chunk of a prompt gets a call of its own.
        single = [s for s, (a, b) in enumerate(spans) if b - a == 1]
        chunks = [s for s, (a, b) in enumerate(spans) if b - a > 1]
        lens = [batch.context_lens[s] for s in single]
        heads = self._config.num_heads
        decode = together([slots[s] for s in single], lens, heads, self.keys[0]) if single else None
        rows = torch.tensor([spans[s][0] for s in single], device=self._device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]  # [N, Hkv, M, Dh]
            # 1. Each new token's key and value go to its sequence's slot, at its position.
            keys.view(-1, Dh).index_copy_(0, row_of, k.reshape(-1, Dh))
            values.view(-1, Dh).index_copy_(0, row_of, v.reshape(-1, Dh))
            # 2. Each sequence's queries see what its slot holds, which is not copied.
            if not chunks:
                return decode(q, keys, values)
            out = torch.empty_like(q)  # [T, Hq, Dh]
            if single:
                out[rows] = decode(q[rows], keys, values)
            for s in chunks:
                slot, (a, b), n = slots[s], spans[s], batch.context_lens[s]
                own = (cache[slot, :, :n].transpose(0, 1) for cache in (keys, values))  # [n, Hkv, Dh]
                out[a:b] = self._kernel(q[a:b], *own, (0, b - a), (0, n))
            return out

        return attend
