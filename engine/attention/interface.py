"""The one thing a model and its memory agree on. Part 1.

The model computes queries, keys and values for T new tokens and calls `attend`. Whoever supplies `attend`
decides which tokens see which, and where keys and values live: nowhere (Part 1), one buffer (3), slots (6),
pages (12).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

# out[T, Hq, Dh] = attend(layer, q[T, Hq, Dh], k[T, Hkv, Dh], v[T, Hkv, Dh])
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# A varlen kernel: S sequences end to end. Sequence s owns queries query_start[s]:query_start[s+1] and keys
# key_start[s]:key_start[s+1]; its queries are its *last* tokens, so query i sees every key up to its own.
# out[T, Hq, Dh] = kernel(q[T, Hq, Dh], k[K, Hkv, Dh], v[K, Hkv, Dh], query_start[S+1], key_start[S+1])
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]
