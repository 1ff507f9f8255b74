"""The forward pass of Llama and Qwen3 over the tokens of prompts, with few kernels between matrix products.
Part 20.

Promises the model's hidden states up to rounding. The residual sum is in fp32.
`llama_rows.py` has the kernels between the products. The caller passes attention, as to the model.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.kernels.llama_attend import gains_of, llama_blocks, qkv_product
from engine.kernels.llama_rows import (
    LlamaRows,
    SumParts,
    add_rms_norm,
    embed_rms_norm,
    next_gains_of,
    rotate_and_store,
    silu_mul,
    summed_weights_of,
    unchanged,
)
from engine.kernels.prompt_rows import gpt2_prompt_forward
from engine.models.llama import Model as Llama


def prompt_forward(
    model: nn.Module, sum_parts: SumParts | None = None
) -> Callable[[Tensor, Tensor, Attend], Tensor]:
    """The fastest forward pass over prompts' tokens, called as the model is: `LlamaPrompts` for a model on a
    GPU that `LlamaRows.fits`, and otherwise the result of `gpt2_prompt_forward`. `sum_parts`: as for
    `LlamaRows`.
    """
    if LlamaRows.fits(model, is_part=sum_parts is not None) and model.embed.weight.is_cuda:
        return LlamaPrompts(model, sum_parts)
    return gpt2_prompt_forward(model)


class LlamaPrompts:
    """The forward pass of the tokens of a step's prompts, for a model for which `LlamaRows.fits` is true."""

    def __init__(self, model: Llama, sum_parts: SumParts | None = None) -> None:
        """`sum_parts`: as for `LlamaRows`."""
        self.model, self.blocks, self.next_gains = model, llama_blocks(model), next_gains_of(model)
        self.summed_weights = [summed_weights_of(block) for block in self.blocks]
        self.sum_parts = unchanged if sum_parts is None else sum_parts
        self.frequencies = model.get_buffer("frequencies")

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D] after the last norm, for the model's `logits`."""
        model, config, T = self.model, self.model.config, len(token_ids)
        D, Dh, Hkv = config.hidden_size, config.head_dim, config.num_kv_heads
        eps = config.norm_eps
        shape = {"D": D, "PADDED": triton.next_power_of_2(D), "num_warps": 4}
        first_gain = self.blocks[0].norm1.weight
        # `x` is the residual, in fp32. Each kernel that adds to it also writes `normed`, the next input.
        x = token_ids.new_empty(T, D, dtype=torch.float32)
        normed = token_ids.new_empty(T, D, dtype=model.embed.weight.dtype)
        q = normed.new_empty(T, config.num_heads, Dh)
        k, v = normed.new_empty(T, Hkv, Dh), normed.new_empty(T, Hkv, Dh)
        inner = normed.new_empty(T, config.intermediate_size)
        cos, sin = config.rope.angles(positions, self.frequencies, torch.float32)  # [T, 1, Dh/2] each
        slots = torch.arange(T, device=x.device)  # token t's key and value go to row t of k and v
        embed_rms_norm[(T,)](token_ids, model.embed.weight, x, first_gain, normed, eps, **shape)
        for layer, (block, next_gain) in enumerate(zip(self.blocks, self.next_gains, strict=True)):
            attention, mlp = block.attention, block.mlp
            qkv = qkv_product(attention, normed)
            rotate_and_store(config, qkv, q, k, v, slots, cos, sin, gains_of(attention))
            attended = attend(layer, q, k, v)  # [T, Hq, Dh]
            proj, down = self.summed_weights[layer]
            product = self.sum_parts(torch.mm(attended.flatten(1), proj.t()))
            add_rms_norm[(T,)](x, product, block.norm2.weight, normed, eps, **shape)
            gate_up = torch.mm(normed, mlp.gate_up.weight.t())
            product = self.sum_parts(torch.mm(silu_mul(gate_up, inner), down.t()))
            add_rms_norm[(T,)](x, product, next_gain, normed, eps, **shape)
        return normed
