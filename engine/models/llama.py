"""Llama on one flat token axis: RMSNorm, rotary positions, grouped heads, a gated MLP. Part 20.

Promises Hugging Face's numbers for any Llama checkpoint (Llama 1 to 3, TinyLlama), and computes Qwen3 too
(qwen3.py), which norms queries and keys. Like GPT-2's file it knows nothing of sequences and of where keys
and values live: so batching, pages, graphs and all that Parts 3 to 19 add work with it unchanged.
Sources: Touvron et al. 2023, https://arxiv.org/abs/2302.13971; grouped heads: Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245; SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.rope import Rope, rope_from, rotate
from engine.models.weights import Embedding, Linear, Module, Place

MAX_HEAD_DIM = 1 << 16  # far above any model's; its frequencies are computed before memory is counted
Angles = tuple[Tensor, Tensor]  # cosines and sines, [T, 1, Dh/2] each


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """ModelConfig, and the settings that this family alone has."""

    rope: Rope = Rope(())
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed, head by head (Qwen3)


def config_from(raw: dict) -> LlamaConfig:
    """Llama's config.json in our vocabulary.

    Raises CheckpointError for a setting this file does not compute.
    """
    D, heads = raw["hidden_size"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act={activation!r} is not supported, only silu")
    if not (head_dim := raw.get("head_dim")):
        if D % heads:
            raise CheckpointError(f"hidden_size={D} is not a multiple of num_attention_heads={heads}")
        head_dim = D // heads
    if type(head_dim) is int and head_dim > MAX_HEAD_DIM:  # before its frequencies are computed
        raise CheckpointError(f"head_dim={head_dim!r:.40}: at most {MAX_HEAD_DIM:,} is accepted")
    return LlamaConfig(
        model_type=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=D,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        activation=activation,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        raw=raw,
        rope=rope_from(raw, head_dim),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )


class RMSNorm(Module, nn.RMSNorm):
    """x divided by its root mean square: LayerNorm without the mean and without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """x[..., D] -> the same shape and dtype: each row divided by √(mean of its squares + self.eps), times
        self.weight[D]. Squares, mean and root are fp32 whatever the dtype is, as fp16 ends at 65,504.
        """
        return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Attention(Module):
    """Hq query heads over Hkv heads of keys and values. Hq / Hkv neighbouring query heads share a key head,
    so the cache is Hq / Hkv times smaller.
    """

    def __init__(self, layer: int, config: LlamaConfig, **factory) -> None:
        super().__init__()
        Hq, Hkv, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.heads, self.head_dim = layer, (Hq, Hkv, Hkv), Dh
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, (Hq + 2 * Hkv) * Dh, bias=bias, **factory)
        self.proj = Linear(Hq * Dh, config.hidden_size, bias=bias, **factory)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(Dh, eps=config.norm_eps, **factory)
            self.k_norm = RMSNorm(Dh, eps=config.norm_eps, **factory)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """x[T, D] -> [T, D], through one call of `attend(self.layer, q, k, v)`.

        The rows of `qkv` are all heads of queries, then all of keys, then all of values (self.heads says how
        many of each). Queries and keys are normed head by head (if there are norms), then turned; values are
        neither. Keys and values are handed over once per head they have: who shares them is attend's affair,
        and so is the division by √Dh.
        What it gives back, [T, Hq, Dh], goes through `proj`, head after head.
        """
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, Dh]
        q, k, v = qkv.split(self.heads, dim=1)  # [T, Hq, Dh], [T, Hkv, Dh] twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, angles), rotate(k, angles), v)  # [T, Hq, Dh]
        return self.proj(out.flatten(1))  # [T, D]


class MLP(Module):
    """SwiGLU: one product says what there is to add, another, through silu, how much of it is let in."""

    def __init__(self, config: LlamaConfig, **factory) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, 2 * inner, bias=bias, **factory)
        self.down = Linear(inner, config.hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, inner] each
        return self.down(F.silu(gate) * up)  # [T, D]


class Block(Module):
    """Attention, then MLP; each adds to x[T, D] what it makes of x normed."""

    def __init__(self, layer: int, config: LlamaConfig, **factory) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps, **factory)
        self.norm1, self.attention = norm(), Attention(layer, config, **factory)
        self.norm2, self.mlp = norm(), MLP(config, **factory)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.attention(self.norm1(x), angles, attend)  # tokens exchange information
        return x + self.mlp(self.norm2(x))  # each token thinks for itself


class Model(LanguageModel):
    """Llama or Qwen3. Parameters are uninitialised until the loader fills them."""

    config: LlamaConfig
    head: nn.Linear
    frequencies: Tensor  # fp32[Dh/2]: radians per position

    def __init__(
        self, config: LlamaConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.blocks = nn.ModuleList(Block(layer, config, **factory) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float, device=device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D], normalised, ready for `logits`.

        Raises ValueError for a token id past the vocabulary, naming it and the last one there is (on a GPU
        the caller must check). Any position is computed: how far the model is of use is the caller's affair.
        """
        try:
            x = self.embed(token_ids)  # [T, D]
        except IndexError:
            raise ValueError(
                f"token id {int(token_ids.max())} is out of range: this model has token ids 0 to "
                f"{self.config.vocab_size - 1}"
            ) from None
        angles = self.config.rope.angles(positions, self.frequencies, x.dtype)
        for block in self.blocks:
            x = block(x, angles, attend)
        return self.norm(x)


def places(config: LlamaConfig) -> dict[str, Place]:
    """Hugging Face's tensor names, without the prefix `model.`, and their places above.

    embed_tokens, norm and lm_head (if it is not tied: then no file needs it) are our embed, norm and head. Of
    layers.N, ours are in blocks.N:
        self_attn.q_proj, k_proj, v_proj       attention.qkv: rows of Hq heads, then of Hkv, then of Hkv
        self_attn.o_proj                       attention.proj
        mlp.gate_proj, up_proj                 mlp.gate_up: the gate's rows, then up's
        mlp.down_proj                          mlp.down
        input_layernorm                        norm1
        post_attention_layernorm               norm2
        self_attn.q_norm, k_norm               attention.q_norm, k_norm (only with config.qk_norm)
    Each has a weight, [out, in] on both sides; the linear layers have a bias where config.attention_bias or
    config.mlp_bias says so, of the same rows. What fills a whole parameter has no rows (None).
    """
    table = {"embed_tokens.weight": Place("embed.weight"), "norm.weight": Place("norm.weight")}
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = Place("head.weight")
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    linears = {
        "self_attn.q_proj": ("attention.qkv", slice(0, q), config.attention_bias),
        "self_attn.k_proj": ("attention.qkv", slice(q, q + kv), config.attention_bias),
        "self_attn.v_proj": ("attention.qkv", slice(q + kv, q + 2 * kv), config.attention_bias),
        "self_attn.o_proj": ("attention.proj", None, config.attention_bias),
        "mlp.gate_proj": ("mlp.gate_up", slice(0, inner), config.mlp_bias),
        "mlp.up_proj": ("mlp.gate_up", slice(inner, 2 * inner), config.mlp_bias),
        "mlp.down_proj": ("mlp.down", None, config.mlp_bias),
    }
    norms = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
    for i in range(config.num_layers):
        for theirs, (ours, rows, bias) in linears.items():
            for leaf in ("weight", "bias") if bias else ("weight",):
                table[f"layers.{i}.{theirs}.{leaf}"] = Place(f"blocks.{i}.{ours}.{leaf}", rows)
        for theirs, ours in norms.items():
            table[f"layers.{i}.{theirs}.weight"] = Place(f"blocks.{i}.{ours}.weight")
    return table


PREFIX = "model."
# Saved by some versions, computed here: the frequencies, and the head when it is the embedding.
REDUNDANT = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight"
