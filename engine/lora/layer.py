"""A linear layer that adds to each row the difference of that row's adapter. Part 18.

Wraps any linear layer, packed (Part 3) or quantized (Part 17) ones too: y is the wrapped layer's result plus
the difference. Does not know which requests there are: `rows` does.
"""

import torch
from torch import Tensor

from engine.layers.replace import LinearLayer
from engine.lora.adapter import Factors
from engine.lora.rows import Rows
from engine.models.weights import Module


class LoRALinear(Module):
    """base(x) + x·Aᵀ·(scale·B)ᵀ, with A and B of the slot that the row belongs to."""

    def __init__(
        self, base: LinearLayer, rows: Rows, max_loras: int, num_parts: int, max_rank: int, like: Tensor
    ) -> None:
        """`num_parts`: how many of Hugging Face's layers `base` is. `like`: its device and dtype are the
        slots'. The slots: down[max_loras, in, K], up[max_loras, K, out], with K = num_parts · max_rank.
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
        """Copy an adapter's factors for this layer into a slot. Parts that it does not change, and ranks
        beyond its own, are zeros.
        """
        self.down[slot].zero_()
        self.up[slot].zero_()
        for i, factors in enumerate(parts):
            r = len(factors.A)
            ranks = slice(i * self.max_rank, i * self.max_rank + r)
            self.down[slot][:, ranks] = factors.A.T
            self.up[slot][ranks, factors.rows or slice(None)] = scale * factors.B.T
