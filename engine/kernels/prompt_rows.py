"""GPT-2's forward pass over the tokens of prompts, with few kernels between matrix products. Part 13, tuned
for prompts.

Promises the model's hidden states up to rounding. As in `many_rows.py`, one kernel computes the residual sum,
a bias and the norm, and gelu is part of the product before. The caller passes attention, as to the model.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.kernels.many_rows import add_norm, embed_norm, linear_gelu, next_norms_of
from engine.kernels.plain_layers import gpt2_blocks
from engine.kernels.single_row import SingleRow
from engine.models.gpt2 import Model as GPT2


def gpt2_prompt_forward(model: nn.Module) -> Callable[[Tensor, Tensor, Attend], Tensor]:
    """The fastest forward pass over prompts' tokens, called as the model is: `PromptRows` if
    `SingleRow.fits(model)` is true and the model is on a GPU, and otherwise the model itself. Used as
    `EagerWay(forward=)`.
    """
    return PromptRows(model) if SingleRow.fits(model) and model.embed.weight.is_cuda else model


class PromptRows:
    """The forward pass of the tokens of a step's prompts, for a model for which `SingleRow.fits` is true."""

    def __init__(self, model: GPT2) -> None:
        self.model, self.blocks = model, gpt2_blocks(model)
        self.next_norms = next_norms_of(model)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D] after the last norm, for the model's `logits`."""
        # `x` is the residual, in fp32. Each kernel that adds to it also writes `normed`, the input of the
        # next product.
        model, config, T = self.model, self.model.config, len(token_ids)
        D, H, Dh, eps = config.hidden_size, config.num_heads, config.head_dim, config.norm_eps
        shape = {"D": D, "PADDED": triton.next_power_of_2(D), "PDL": False, "num_warps": 8}
        x = token_ids.new_empty(T, D, dtype=torch.float32)
        normed = token_ids.new_empty(T, D, dtype=model.embed.weight.dtype)
        first_norm = self.blocks[0].norm1
        embed_norm[(T,)](
            token_ids, positions, model.embed.weight, model.embed_position.weight, x,
            first_norm.weight, first_norm.bias, normed, eps, **shape,
        )  # fmt: skip

        def add(a: Tensor, linear: nn.Linear, norm: nn.LayerNorm) -> None:
            """x[T, D] += linear(a[T, in]), and normed = norm(x)."""
            product = torch.mm(a, linear.weight.t())
            add_norm[(T,)](
                x, product, linear.bias, norm.weight, norm.bias, normed, eps, T * D, SPLITS=1, **shape
            )

        for layer, (block, next_norm) in enumerate(zip(self.blocks, self.next_norms, strict=True)):
            qkv = F.linear(normed, block.attention.qkv.weight, block.attention.qkv.bias)
            q, k, v = qkv.view(T, 3, H, Dh).unbind(1)  # [T, H, Dh] each
            attended = attend(layer, q, k, v)  # [T, H, Dh]
            add(attended.flatten(1), block.attention.proj, block.norm2)
            add(linear_gelu(normed, block.mlp.up), block.mlp.down, next_norm)
        return normed
