"""The interface between a model and the memory of its keys and values. Part 1.

The model computes queries, keys and values for T new tokens and calls `attend`. The code that supplies
`attend` decides which tokens each token sees, and where keys and values are stored: nowhere (Part 1), in one
buffer (Part 3), in slots (Part 7), or in pages (Part 12).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from engine.machine.device import on_device

# The attention of one layer: out[T, Hq, Dh] = attend(layer, q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh]).
# `layer` counts from 0.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Spans:
    """Where the queries and keys of S sequences lie, end to end: sequence s has the queries
    query_start[s]:query_start[s+1] and the keys key_start[s]:key_start[s+1].

    A step makes one `Spans` and hands it to the kernel of every layer. Raises ValueError if the two fields
    differ in length.
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
        """query_start and key_start as int32 tensors[S+1] on `device`. Only the first call copies them."""
        if device not in self._by_device:
            query_start, key_start = on_device(device, self.query_start, self.key_start, dtype=torch.int32)
            self._by_device[device] = query_start, key_start
        return self._by_device[device]

    def slices(self) -> list[tuple[slice, slice]]:
        """[S]: which of the T queries and which of the K keys belong to each sequence, as slices."""
        queries = [slice(start, end) for start, end in pairwise(self.query_start)]
        keys = [slice(start, end) for start, end in pairwise(self.key_start)]
        return list(zip(queries, keys, strict=True))

    @staticmethod
    @lru_cache(maxsize=16)
    def of_one(num_queries: int, num_keys: int) -> "Spans":
        """The spans of one sequence: its last `num_queries` tokens over all its `num_keys` keys.

        The result is cached, so all layers of a step share one record and its copy on the device.
        """
        return Spans((0, num_queries), (0, num_keys))


# Attention of S sequences of different lengths in one call:
# out[T, Hq, Dh] = kernel(q[T, Hq, Dh], k[K, Hkv, Dh], v[K, Hkv, Dh], spans).
# The queries of a sequence are those of its *last* tokens. Each query sees the keys of its own sequence, up
# to the key of its own token.
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Spans], Tensor]
