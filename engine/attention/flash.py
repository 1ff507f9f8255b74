"""PyTorch's own attention in tiles: `scaled_dot_product_attention`, and on a GPU its kernel for packed
sequences. Part 9.

Promises the results of `dense.py` up to rounding, in memory that grows linearly with the length. Where
`supports_varlen` says so, one call of `varlen_attn` computes all packed sequences; otherwise there is one
call per sequence. Document:
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.interface import Spans
from engine.attention.varlen import max_length, per_sequence

MASK_QUERIES = 256  # queries, and so rows, of one mask


def sdpa_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence's last Tq tokens over its Tk ≥ Tq tokens. No token sees a later token.

    q[Tq, Hq, Dh], k[Tk, Hkv, Dh], v[Tk, Hkv, Dh] -> [Tq, Hq, Dh]. PyTorch's `is_causal=True` lets query i
    see keys 0 to i, which is right only if Tq = Tk. A single query sees all keys and needs no mask. If
    1 < Tq < Tk, a mask says which keys each query sees. A mask for all queries would take memory of Tq · Tk,
    so PyTorch is called for MASK_QUERIES queries at a time, with the keys that the last of these queries
    sees. PyTorch accepts fewer key heads than query heads only with `enable_gqa`.
    """
    (Tq, Hq, _), (Tk, Hkv, _) = q.shape, k.shape
    grouped = Hq != Hkv
    # [1, Hq, Tq, Dh], [1, Hkv, Tk, Dh], [1, Hkv, Tk, Dh]
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if Tq == 1 or Tq == Tk:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=Tq > 1, enable_gqa=grouped)
        return out[0].transpose(0, 1)  # [Tq, Hq, Dh]
    parts = []  # [1, Hq, R, Dh] each
    for first in range(0, Tq, MASK_QUERIES):
        rows = q[:, :, first : first + MASK_QUERIES]  # [1, Hq, R, Dh]
        R = rows.shape[2]
        num_keys = Tk - Tq + first + R  # the number of keys that the last of these rows sees
        ones = torch.ones(R, num_keys, dtype=torch.bool, device=q.device)  # [R, num_keys]
        mask = ones.tril_(num_keys - R)  # the first row sees R - 1 keys fewer than the last row
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]  # [1, Hkv, num_keys, Dh]
        parts.append(F.scaled_dot_product_attention(rows, keys, values, mask, enable_gqa=grouped))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)  # [Tq, Hq, Dh]


_sdpa_per_sequence = per_sequence(sdpa_causal_attention)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The `VarlenKernel` (interface.py) that uses PyTorch's attention.

    q[T, Hq, Dh], k[K, Hkv, Dh], v[K, Hkv, Dh] -> [T, Hq, Dh].
    """
    if not supports_varlen(q, k):
        return _sdpa_per_sequence(q, k, v, spans)
    # Imported only here, because the import loads kernels that a CPU does not need.
    from torch.nn.attention.varlen import varlen_attn

    query_start, key_start = spans.on(q.device)
    max_queries, max_keys = max_length(spans.query_start), max_length(spans.key_start)
    # A window_size of (-1, 0) shows each query all earlier keys, and no later key.
    out = varlen_attn(
        q, k, v, query_start, key_start, max_queries, max_keys, window_size=(-1, 0)
    )  # [T, Hq, Dh]
    assert isinstance(out, Tensor)  # varlen_attn returns a tuple only with `return_aux`
    return out


def supports_varlen(q: Tensor, k: Tensor) -> bool:
    """Whether `varlen_attn` of torch 2.11 accepts q[T, Hq, Dh] and k[K, Hkv, Dh]: it requires numbers of 16
    bits, a GPU of Nvidia's generation Ampere or later, Hq = Hkv, and a Dh that is a multiple of 8.
    """
    return (
        q.is_cuda
        and q.element_size() == 2
        and q.shape[1] == k.shape[1]
        and q.shape[2] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
