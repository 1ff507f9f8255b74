"""A linear layer that adds the difference of each row's adapter to the row. Part 18.

The layer wraps any other linear layer, also a packed one (Part 3) or a quantized one (Part 17). Its result is
the wrapped layer's result plus the difference. The layer does not know requests: the record `rows` says which
slot each row has.
"""

import torch
from torch import Tensor

from engine.layers.replace import LinearLayer
from engine.lora.adapter import Factors
from engine.lora.rows import AdapterRows
from engine.models.weights import Module


class LoRALinear(Module):
    """base(x) + x·Aᵀ·(scale·B)ᵀ, where A and B are those of the row's slot."""

    def __init__(
        self,
        base: LinearLayer,
        rows: AdapterRows,
        max_loras: int,
        num_parts: int,
        max_rank: int,
        like: Tensor,
    ) -> None:
        """Make empty slots: down[max_loras, in, K] and up[max_loras, K, out], with K = num_parts · max_rank.

        `num_parts`: the number of Hugging Face's layers that `base` fuses (3 for qkv). `like`: a tensor with
        the device and dtype that the slots get.
        """
        super().__init__()
        self.base, self.rows, self.max_rank = base, rows, max_rank
        self.in_features, self.out_features = base.in_features, base.out_features
        K = num_parts * max_rank
        self.down = torch.zeros(max_loras, self.in_features, K, device=like.device, dtype=like.dtype)
        self.up = torch.zeros(max_loras, K, self.out_features, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return self.rows.add(self.base(x), x, self.down, self.up)

    @torch.no_grad()
    def write(self, slot: int, parts: tuple[Factors, ...], scale: float) -> None:
        """Copy an adapter's factors for this layer, one for each changed part, into a slot.

        All other numbers of the slot become 0: parts that the adapter leaves unchanged, and ranks above the
        adapter's own rank.
        """
        self.down[slot].zero_()
        self.up[slot].zero_()
        for i, factors in enumerate(parts):
            r = len(factors.A)
            ranks = slice(i * self.max_rank, i * self.max_rank + r)
            outputs = slice(None) if factors.rows is None else factors.rows
            self.down[slot][:, ranks] = factors.A.T
            self.up[slot][ranks, outputs] = scale * factors.B.T
