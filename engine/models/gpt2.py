"""GPT-2 on one flat token axis: embed, L blocks of attention and MLP, norm, logits.

Promises Hugging Face's numbers for any GPT-2 checkpoint. The model does not know how many sequences the T
tokens belong to, nor where keys and values are stored: only `attend` knows both. Part 1.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.weights import Embedding, LayerNorm, Linear, Module, Place

PREFIX = "transformer."  # of the names of tensors; some files leave it out
# Tensors that some versions save and this model does not need: causal masks, and a tied head.
REDUNDANT = r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
# Settings of Hugging Face's GPT2Config that change the arithmetic, each with the only value supported here.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def config_from(raw: dict) -> ModelConfig:
    """Translate GPT-2's config.json, given as `raw`, to a ModelConfig.

    Raises CheckpointError for a setting that this module does not support, and KeyError for a missing field.
    """
    for name, value in FIXED.items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{name}={raw[name]} is not supported, only {value}")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"activation_function={activation!r} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    D, heads = raw["n_embd"], raw["n_head"]
    if D % heads:
        raise CheckpointError(f"n_embd={D} is not a multiple of n_head={heads}")
    return ModelConfig(
        model_type="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=D,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=D // heads,
        intermediate_size=raw.get("n_inner") or 4 * D,
        max_positions=raw["n_positions"],
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=activation,
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        raw=raw,
    )


class Attention(Module):
    """Self-attention with Hq heads of queries, keys and values: x[T, D] -> [T, D]."""

    def __init__(self, layer: int, config: ModelConfig, **factory) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.num_heads, config.head_dim
        width = config.num_heads * config.head_dim  # D
        self.qkv = Linear(config.hidden_size, 3 * width, **factory)
        self.proj = Linear(width, config.hidden_size, **factory)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x[T, D] -> [T, D], through one call of `attend`."""
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.head_dim).unbind(1)  # each [T, Hq, Dh]
        out = attend(self.layer, q, k, v)  # [T, Hq, Dh]
        return self.proj(out.flatten(1))  # [T, D]


class MLP(Module):
    """Two linear layers with an activation between them: x[T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, **factory) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.intermediate_size, **factory)
        self.down = Linear(config.intermediate_size, config.hidden_size, **factory)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x[T, D] -> [T, D]"""
        return self.down(self.activation(self.up(x)))  # [T, D] -> [T, intermediate_size] -> [T, D]


class Block(Module):
    """Attention, then the MLP: each adds to x[T, D] its result for the normalised x."""

    def __init__(self, layer: int, config: ModelConfig, **factory) -> None:
        super().__init__()
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps, **factory)
        self.norm1, self.attention = norm(), Attention(layer, config, **factory)
        self.norm2, self.mlp = norm(), MLP(config, **factory)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x[T, D] -> [T, D], through one call of `attend`."""
        x = x + self.attention(self.norm1(x), attend)  # tokens exchange information
        return x + self.mlp(self.norm2(x))  # each token is computed by itself


class Model(LanguageModel):
    """GPT-2. The parameters are uninitialised until the loader fills them."""

    head: nn.Linear  # [T, D] -> [T, V]

    def __init__(
        self, config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.embed_position = Embedding(config.max_positions, config.hidden_size, **factory)
        self.blocks = nn.ModuleList(Block(layer, config, **factory) for layer in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D], after the last norm: the input of `logits`.

        Raises ValueError for a position or a token id past the model's embedding tables, wherever it stands:
        the T tokens may be several sequences end to end. The message names the largest position and id, and
        the last ones that the tables have. On a GPU the caller must check both.
        """
        try:
            x = self.embed(token_ids) + self.embed_position(positions)  # [T, D]
        except IndexError:
            raise ValueError(
                f"position {int(positions.max())} or token id {int(token_ids.max())} is out of range: this "
                f"model learned positions 0 to {self.config.max_positions - 1} and token ids 0 to "
                f"{self.config.vocab_size - 1}"
            ) from None
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)


def places(config: ModelConfig) -> dict[str, Place]:
    """Hugging Face's tensor names, without the optional prefix `transformer.`, with their places in Model."""
    table = {
        "wte.weight": Place("embed.weight"),
        "wpe.weight": Place("embed_position.weight"),
        "ln_f.weight": Place("norm.weight"),
        "ln_f.bias": Place("norm.bias"),
    }
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = Place("head.weight")
    linears = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.proj",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    for i in range(config.num_layers):
        for theirs, ours in linears.items():
            matrices = 3 if ours == "attention.qkv" else 1
            table[f"h.{i}.{theirs}.weight"] = Place(
                f"blocks.{i}.{ours}.weight", transpose=True, matrices=matrices
            )
            table[f"h.{i}.{theirs}.bias"] = Place(f"blocks.{i}.{ours}.bias", matrices=matrices)
        for theirs, ours in {"ln_1": "norm1", "ln_2": "norm2"}.items():
            for leaf in ("weight", "bias"):
                table[f"h.{i}.{theirs}.{leaf}"] = Place(f"blocks.{i}.{ours}.{leaf}")
    return table
