"""Llama or Qwen3 over the tokens of prompts: the small work between products in few kernels. Part 20.

Promises the model's own hidden states up to rounding, called as the model is: the residual sum is kept in
fp32. Where the model's file has a kernel for each small thing, this has those of `llama_rows.py`; attention
is whoever's it was.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.kernels import prompt_rows
from engine.kernels.llama_rows import LlamaRows, _add_norm, _embed_norm, silu_mul, turn_and_store


def prompts(model: nn.Module) -> Callable[[Tensor, Tensor, Attend], Tensor]:
    """Who computes steps that are not one new token each. For `GraphForward(make_prompts=)`."""
    if LlamaRows.fits(model) and model.embed.weight.is_cuda:
        return LlamaPrompts(model)
    return prompt_rows.prompts(model)


class LlamaPrompts:
    """The forward pass of T tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D], normalised, ready for `logits`."""
        model, config, T = self.model, self.model.config, len(token_ids)
        D, Dh, Hkv = config.hidden_size, config.head_dim, config.num_kv_heads
        dtype, eps = model.embed.weight.dtype, config.norm_eps
        shape = {"D": D, "PADDED": triton.next_power_of_2(D), "num_warps": 4}
        norms = [norm.weight for block in model.blocks for norm in (block.norm1, block.norm2)]
        norms.append(model.norm.weight)
        x, normed = token_ids.new_empty(T, D, dtype=torch.float32), token_ids.new_empty(T, D, dtype=dtype)
        q, k, v = (normed.new_empty(T, heads, Dh) for heads in (config.num_heads, Hkv, Hkv))
        inner = normed.new_empty(T, config.intermediate_size)
        cos, sin = config.rope.angles(positions, model.frequencies, torch.float32)  # [T, 1, Dh/2] each
        rows = torch.arange(T, device=x.device)  # where keys and values go: side by side
        _embed_norm[(T,)](token_ids, model.embed.weight, x, norms[0], normed, eps, **shape)
        for layer, block in enumerate(model.blocks):
            attention, mlp = block.attention, block.mlp
            gains = (attention.q_norm.weight, attention.k_norm.weight) if config.qk_norm else (None, None)
            qkv = torch.mm(normed, attention.qkv.weight.t())
            turn_and_store(config, qkv, q, k, v, rows, cos, sin, gains)
            product = torch.mm(attend(layer, q, k, v).flatten(1), attention.proj.weight.t())
            _add_norm[(T,)](x, product, norms[2 * layer + 1], normed, eps, **shape)
            product = torch.mm(silu_mul(torch.mm(normed, mlp.gate_up.weight.t()), inner), mlp.down.weight.t())
            _add_norm[(T,)](x, product, norms[2 * layer + 2], normed, eps, **shape)
        return normed
