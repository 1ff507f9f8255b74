"""Steps of a running softmax that the tuned attention kernels share. Part 13.

`paged_attention.py`, which a reader meets first, has the same steps inside its kernels.
"""

import triton
import triton.language as tl


@triton.jit
def add_tile(scores, v, maximum, total, weighted):
    """Add a tile of tokens to a running softmax -> the new maximum[R], total[R] and weighted[R, DH], in fp32.

    scores[R, TOKENS] are scaled, and -inf where a row does not see a token. v[TOKENS, DH] are the values.
    `maximum` is the largest score so far, `total` the sum of exp(score - maximum), and `weighted` the sum of
    exp(score - maximum) · v. Before the first tile they are -inf, 0 and 0, or the state after other tokens.
    With -inf, a row without a finite score in this tile and all earlier tiles becomes NaN. A caller with such
    rows begins with a finite maximum below all scores (extras_attention.py).
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))  # [R]
    shrink = tl.exp(maximum - new_maximum)  # [R]
    weights = tl.exp(scores - new_maximum[:, None])  # [R, TOKENS]
    total = total * shrink + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return new_maximum, total, weighted


@triton.jit
def merge_parts(parts, maxima, totals, row, num_parts, dim, SPLITS: tl.constexpr, DH: tl.constexpr):
    """The mean[DH] of the first `num_parts` parts of row `row`, each relative to its own maximum.

    parts[rows, SPLITS, DH], maxima and totals[rows, SPLITS]; dim = 0 to DH - 1, without a mask, so DH must be
    a power of two, and so must SPLITS. Other programs have just written the parts, and a cache may hold older
    numbers. `volatile` loads do not read from such caches.
    """
    part = tl.arange(0, SPLITS)
    index, valid = row * SPLITS + part, part < num_parts  # [SPLITS] each
    maximum = tl.load(maxima + index, mask=valid, other=-float("inf"), volatile=True)
    total = tl.load(totals + index, mask=valid, other=0.0, volatile=True)
    address = parts + index[:, None] * DH + dim[None, :]  # [SPLITS, DH]
    weighted = tl.load(address, mask=valid[:, None], other=0.0, volatile=True)
    factor = tl.exp(maximum - tl.max(maximum, 0))
    return tl.sum(weighted * factor[:, None], 0) / tl.sum(total * factor, 0)
