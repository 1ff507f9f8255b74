"""Steps of a running softmax that the tuned attention kernels share. Part 13; `paged_attention.py` shows them
where they stand.
"""

import triton
import triton.language as tl


@triton.jit
def add_tile(scores, v, maximum, total, weighted):
    """A tile of tokens more: scores[R, T], -inf for what is none, and v[T, DH] -> the new maximum[R],
    total[R] and weighted[R, DH].
    """
    new = tl.maximum(maximum, tl.max(scores, 1))
    shrink = tl.exp(maximum - new)
    weights = tl.exp(scores - new[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return new, total, weighted


@triton.jit
def joined(parts, maxima, totals, row, count, d, SPLITS: tl.constexpr, DH: tl.constexpr):
    """The mean[DH] of the first `count` of a row's parts, each relative to its own maximum: parts[·, SPLITS,
    DH], maxima and totals[·, SPLITS], which other programs have just written.
    """
    s = tl.arange(0, SPLITS)
    index, valid = row * SPLITS + s, s < count
    maximum = tl.load(maxima + index, mask=valid, other=-float("inf"), volatile=True)
    total = tl.load(totals + index, mask=valid, other=0.0, volatile=True)
    address = parts + index[:, None] * DH + d[None, :]
    weighted = tl.load(address, mask=valid[:, None], other=0.0, volatile=True)
    factor = tl.exp(maximum - tl.max(maximum, 0))
    return tl.sum(weighted * factor[:, None], 0) / tl.sum(total * factor, 0)
