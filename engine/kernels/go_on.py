"""From the numbers of one pass to those of the next, on the device: each row's chosen token is its next one.
Part 16: a draft model's passes follow one another, and the host writes the numbers of the first alone.
"""

import triton
import triton.language as tl
from torch import Tensor


def go_on(
    given: Tensor, sources: Tensor, positions: Tensor, slots: Tensor, lens: Tensor, tables: Tensor,
    chosen: Tensor, block_size: int,
) -> None:  # fmt: skip
    """Each [S], tables[S, W], as a decode step's graph takes them, one token further. A length of 0: nobody,
    whose numbers stay. A row that chose no token goes on with token 0.
    """
    S, width = tables.shape
    _go_on[(1,)](
        given, sources, positions, slots, lens, tables, chosen, S, width, P=block_size,
        PADDED=triton.next_power_of_2(S),
    )  # fmt: skip


@triton.jit
def _go_on(
    given, sources, positions, slots, lens, tables, chosen, S, width, P: tl.constexpr, PADDED: tl.constexpr
):
    i = tl.arange(0, PADDED)
    length = tl.load(lens + i, mask=i < S, other=0)
    there = length > 0
    block = tl.load(tables + i * width + length // P, mask=there, other=0)
    token = tl.load(chosen + i, mask=there, other=0)
    tl.store(given + i, tl.maximum(token, 0).to(tl.int32), mask=there)
    tl.store(sources + i, -1, mask=there)
    tl.store(positions + i, length, mask=there)
    tl.store(slots + i, block * P + length % P, mask=there)
    tl.store(lens + i, length + 1, mask=there)
