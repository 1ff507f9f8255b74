"""Storing new keys and values in their pages in one launch, in place of two `index_copy_`. Part 13.

Promises that the heads of token t are written to slot slots[t] of the layer's pages. The number of a slot is
block · P + offset in the block. A slot of -1 stands for no token, and nothing is written: a CUDA graph always
runs with the number of rows of its capture, and a step may have fewer tokens.
"""

import triton
import triton.language as tl
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write k and v[T, Hkv, Dh] to the slots slots[T] of keys and values[B, P, Hkv, Dh].

    A token's Hkv · Dh numbers must lie side by side. The distance between tokens may be larger, as in a view
    of a fused qkv.
    """
    T, Hkv, Dh = k.shape
    if T:
        _store[(T,)](
            k, v, keys, values, slots, k.stride(0), v.stride(0),
            WIDTH=Hkv * Dh, PADDED=triton.next_power_of_2(Hkv * Dh),
        )  # fmt: skip


@triton.jit
def _store(k, v, keys, values, slots, k_token, v_token, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Program (token): the token's WIDTH = Hkv · Dh numbers of k go to row slots[token] of keys[B · P,
    WIDTH], and its numbers of v to the same row of values.

    The numbers of token t begin k_token · t numbers after the start of k, and v_token · t after the start of
    v. A slot of -1 stands for no token: nothing is written. `tl.arange` takes only powers of two, so PADDED
    is the first power of two that is at least WIDTH.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    key = tl.load(k + token * k_token + column, mask=inside)
    tl.store(keys + slot * WIDTH + column, key, mask=inside)
    value = tl.load(v + token * v_token + column, mask=inside)
    tl.store(values + slot * WIDTH + column, value, mask=inside)
