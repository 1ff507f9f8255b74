"""New keys and values into their pages, in one launch: what two `index_copy_` do. Part 13.

Promises that token t's heads are written to slot `slots[t]` (block · P + offset in the block) of the layer's
pages. A slot of -1 is no token, and nothing is written: a CUDA graph runs with as many rows as it was
captured for, also when a step has fewer.
"""

import triton
import triton.language as tl
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """k, v[T, Hkv, Dh] -> keys, values[B, P, Hkv, Dh], at slots[T]. A token's Hkv · Dh numbers must lie
    together; tokens may lie apart (a view of a fused qkv).
    """
    T, Hkv, Dh = k.shape
    if T:
        _store[(T,)](
            k, v, keys, values, slots, k.stride(0), v.stride(0),
            WIDTH=Hkv * Dh, PADDED=triton.next_power_of_2(Hkv * Dh),
        )  # fmt: skip


@triton.jit
def _store(k, v, keys, values, slots, k_token, v_token, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """A program for each token: its WIDTH = Hkv · Dh numbers of k go to row slots[token] of keys[B · P,
    WIDTH], and those of v to values. Token t's numbers begin k_token · t numbers into k, and v_token · t into
    v. A slot of -1 is no token. `tl.arange` takes powers of two alone: PADDED is the first that is at least
    WIDTH.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, PADDED)
    tl.store(keys + slot * WIDTH + i, tl.load(k + token * k_token + i, mask=i < WIDTH), mask=i < WIDTH)
    tl.store(values + slot * WIDTH + i, tl.load(v + token * v_token + i, mask=i < WIDTH), mask=i < WIDTH)
