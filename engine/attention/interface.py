"""The one thing a model and its memory agree on. Part 1.

The model computes queries, keys and values for T new tokens and calls `attend`. Whoever supplies `attend`
decides which tokens see which, and where keys and values live: nowhere (Part 1), one buffer (3), slots (6),
pages (12).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from engine.machine.device import on_device

# out[T, Hq, Dh] = attend(layer, q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh])
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Spans:
    """S sequences end to end: sequence s has the queries query_start[s]:query_start[s+1] and the keys
    key_start[s]:key_start[s+1]. Made once per step and handed to every layer's kernel.
    """

    query_start: tuple[int, ...]  # [S+1]: from 0 to T
    key_start: tuple[int, ...]  # [S+1]: from 0 to K
    _by_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.query_start) != len(self.key_start):
            raise ValueError(
                f"{len(self.query_start) - 1} sequences of queries, {len(self.key_start) - 1} of keys"
            )

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """query_start and key_start as int32 tensors[S+1], copied to the device at the first call only."""
        if device not in self._by_device:
            query_start, key_start = on_device(device, self.query_start, self.key_start, dtype=torch.int32)
            self._by_device[device] = query_start, key_start
        return self._by_device[device]

    @staticmethod
    @lru_cache(maxsize=16)
    def of_one(num_queries: int, num_keys: int) -> "Spans":
        """One sequence's last `num_queries` tokens over all its keys; the same record in every layer."""
        return Spans((0, num_queries), (0, num_keys))


# A varlen kernel: each sequence's queries are its *last* tokens, so query i sees every key up to its own.
# out[T, Hq, Dh] = kernel(q[T, Hq, Dh], k[K, Hkv, Dh], v[K, Hkv, Dh], spans)
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Spans], Tensor]
