"""Gemma: Llama with other norms, scaled embeddings and a GELU. Extension C, as its exercises.

The differences to Llama, from Hugging Face's config.json and modelling code:
- A norm multiplies by 1 + weight, in fp32, and rounds last.
- Embeddings are multiplied by √D, which is rounded to their dtype first. The output layer has the embedding's
  weight, and is not scaled.
- The MLP's gate goes through GELU in its tanh approximation, and not through SiLU.
- A head has `head_dim` numbers, 256 if config.json does not say, whatever D / Hq is.
Promises Hugging Face's numbers for Gemma 1 (2B and 7B). Source: Gemma Team 2024,
https://arxiv.org/abs/2403.08295.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import PREFIX, REDUNDANT, LlamaConfig, places

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Defaults of Hugging Face's GemmaConfig, for fields that config.json leaves out.
DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")  # one function: the first releases wrote "gelu" and meant tanh's


def config_from(raw: dict) -> LlamaConfig:
    """Translate Gemma's config.json, given as `raw`, to a LlamaConfig whose activation is ACTIVATIONS[0].

    Fields that are missing have the values in DEFAULTS; a missing `hidden_act` is ACTIVATIONS[0].
    `llama.config_from` translates the rest; it accepts only hidden_act="silu". The result's `raw` is the one
    given, unchanged. Raises CheckpointError, which names the field and its value, as in hidden_act='silu', if
    `hidden_act` is not in ACTIVATIONS, if `use_bidirectional_attention` is true, or if `llama.config_from`
    refuses a field.
    """
    activation = raw.get("hidden_act") or ACTIVATIONS[0]
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act={activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention=True is not supported: tokens see earlier ones")
    config = llama.config_from(DEFAULTS | raw | {"hidden_act": "silu"})
    return replace(config, activation=ACTIVATIONS[0], raw=raw)


class RMSNorm(llama.RMSNorm):
    """Llama's norm with the gain 1 + weight: a checkpoint stores by how much a gain exceeds 1."""

    def forward(self, x: Tensor) -> Tensor:
        """x[..., D] -> the same shape and dtype.

        Each row is divided by √(mean of its squares + self.eps), and multiplied by 1 + self.weight[D]. All of
        it is computed in fp32, the sum 1 + weight included; only the result is rounded to the dtype of x.
        """
        gains = 1.0 + self.weight.float()  # [D]
        return torch.rms_norm(x.float(), self.normalized_shape, gains, self.eps).type_as(x)


class MLP(llama.MLP):
    """GeGLU: down(gelu(gate(x)) · up(x)), x[T, D] -> [T, D]. `gate_up` computes gate, and then up."""

    def forward(self, x: Tensor) -> Tensor:
        """x[T, D] -> [T, D]. The GELU is its tanh approximation."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, inner] each
        return self.down(F.gelu(gate, approximate="tanh") * up)  # [T, D]


class Model(llama.Model):
    """Llama's model with Gemma's parts in their places, and scaled embeddings."""

    def __init__(
        self, config: LlamaConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Put Gemma's parts where Llama's were: norm1, norm2 and mlp of each block, and the last norm."""
        super().__init__(config, device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps, **factory)
        for block in self.blocks:
            block.norm1, block.norm2, block.mlp = norm(), norm(), MLP(config, **factory)
        self.norm = norm()

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids[T] -> [T, D]: what goes into the first block, self.embed's row of each id times √D.

        √D is rounded to the dtype of the rows first. The embedding's weight does not change: the output layer
        has the same.
        """
        rows = self.embed(token_ids)  # [T, D]
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=rows.dtype)
        return rows * scale.item()
