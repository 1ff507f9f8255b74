"""PyTorch's own attention in tiles: `scaled_dot_product_attention`, and on a GPU its kernel for packed
sequences. Part 9.

Promises what `dense.py` promises, up to rounding, in memory that grows with the length. On a GPU, packed
sequences in 16 bits go through `varlen_attn` in one call. Elsewhere each sequence has a call of its own.
Document: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.interface import Spans
from engine.attention.varlen import each_alone, longest

MASK_QUERIES = 256  # queries that share a mask: so many rows has the largest


def sdpa_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens; none sees a later one.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]. PyTorch's `is_causal=True` lets query i
    see keys 0 to i, which is right only where Tq = Tk. A single query sees all keys and needs no mask.
    Queries with a past get a mask, MASK_QUERIES of them at a time, over the keys that their last one sees: a
    mask for all of them would grow with Tq · Tk. PyTorch takes fewer key heads than query heads if told so:
    `enable_gqa`.
    """
    (Tq, Hq, _), (Tk, Hkv, _) = q.shape, k.shape
    grouped = Hq != Hkv
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, Hq, Tq, Dh], [1, Hkv, Tk, Dh]
    if Tq == 1 or Tq == Tk:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=Tq > 1, enable_gqa=grouped)
        return out[0].transpose(0, 1)  # [Tq, Hq, Dh]
    pieces = []
    for first in range(0, Tq, MASK_QUERIES):
        rows = q[:, :, first : first + MASK_QUERIES]  # [1, Hq, R, Dh]
        R = rows.shape[2]
        num_keys = Tk - Tq + first + R  # that the last of these rows sees
        ones = torch.ones(R, num_keys, dtype=torch.bool, device=q.device)  # [R, num_keys]
        mask = ones.tril_(num_keys - R)  # the first row sees R - 1 keys fewer than the last
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]  # [1, Hkv, num_keys, Dh]
        pieces.append(F.scaled_dot_product_attention(rows, keys, values, mask, enable_gqa=grouped))
    return torch.cat(pieces, dim=2)[0].transpose(0, 1)  # [Tq, Hq, Dh]


_each_sequence = each_alone(sdpa_causal_attention)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The varlen kernel of `interface.py`."""
    if not takes_packed(q, k):
        return _each_sequence(q, k, v, spans)
    from torch.nn.attention.varlen import varlen_attn  # here: it reads kernels that a CPU does not need

    starts = spans.on(q.device)
    lengths = longest(spans.query_start), longest(spans.key_start)
    # The window: every earlier key is seen, and no later one.
    out = varlen_attn(q, k, v, *starts, *lengths, window_size=(-1, 0))  # [T, Hq, Dh]
    assert isinstance(out, Tensor)  # and not a tuple, which only `return_aux` makes of it
    return out


def takes_packed(q: Tensor, k: Tensor) -> bool:
    """Whether `varlen_attn` of torch 2.11 takes these: 16 bits, a GPU from Ampere on, as many key heads as
    query heads.
    """
    return (
        q.is_cuda
        and q.element_size() == 2
        and q.shape[1] == k.shape[1]
        and q.shape[2] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
