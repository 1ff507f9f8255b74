"""Llama on one flat token axis: RMSNorm, rotary positions, grouped heads, a gated MLP. Part 20.

Promises Hugging Face's numbers for any Llama checkpoint (Llama 1 to 3, TinyLlama). Also computes Qwen3
(qwen3.py), which normalises queries and keys. Like gpt2.py, this module does not know which tokens form a
sequence, nor where keys and values are stored. So everything that Parts 3 to 19 add works with Llama
unchanged. Sources: Touvron et al. 2023, https://arxiv.org/abs/2302.13971; grouped heads: Ainslie et al. 2023,
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

PREFIX = "model."  # of the names of tensors; some files leave it out
# Tensors that some versions save and this model does not need: the frequencies, and a tied head.
REDUNDANT = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight"
MAX_HEAD_DIM = 1 << 16  # far above any model; `rope_from` takes memory for it before memory is checked
Angles = tuple[Tensor, Tensor]  # cosines and sines, [T, 1, Dh/2] each


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """A ModelConfig with the settings of Llama, and of the models that share its code."""

    rope: Rope = Rope(())
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether an RMSNorm is applied to each query head and key head (Qwen3)


def config_from(raw: dict) -> LlamaConfig:
    """Translate Llama's config.json, given as `raw`, to a LlamaConfig.

    Raises CheckpointError for a setting that this module does not support, and KeyError for a missing field.
    """
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act={activation!r} is not supported, only silu")
    head_dim = _head_dim(raw)
    return LlamaConfig(
        model_type=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
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


def _head_dim(raw: dict) -> Any:
    """Dh: the setting `head_dim`, else D / Hq. Raises CheckpointError if the latter is no whole number, or if
    Dh is larger than MAX_HEAD_DIM.
    """
    D, heads, head_dim = raw["hidden_size"], raw["num_attention_heads"], raw.get("head_dim")
    if not head_dim:
        if D % heads:
            raise CheckpointError(f"hidden_size={D} is not a multiple of num_attention_heads={heads}")
        head_dim = D // heads
    if type(head_dim) is int and head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"head_dim={head_dim!r:.40}: at most {MAX_HEAD_DIM:,} is accepted")
    return head_dim  # if it is no int, `ModelConfig.from_pretrained` refuses it


class RMSNorm(Module, nn.RMSNorm):
    """Divides x by its root mean square: LayerNorm without subtracting the mean and without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """x[..., D] -> the same shape and dtype.

        Each row is divided by √(mean of its squares + self.eps), and multiplied by self.weight[D]. Squares,
        mean and root are computed in fp32, whatever the dtype of x, because fp16 ends at 65,504.
        """
        return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Attention(Module):
    """Self-attention with Hq query heads and Hkv heads of keys and values.

    Hq / Hkv neighbouring query heads share a key head and a value head, which makes the KV cache Hq / Hkv
    times smaller than with Hq heads of keys and values.
    """

    def __init__(self, layer: int, config: LlamaConfig, **factory) -> None:
        super().__init__()
        Hq, Hkv, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer = layer
        self.heads = (Hq, Hkv, Hkv)  # the numbers of query heads, key heads and value heads in a row of `qkv`
        self.head_dim = Dh
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

        The output of `qkv` has all query heads, then all key heads, then all value heads; self.heads has the
        number of each. Queries and keys are normalised head by head (if q_norm and k_norm exist), and then
        rotated. Values are neither normalised nor rotated. `attend` takes q[T, Hq, Dh], k[T, Hkv, Dh] and
        v[T, Hkv, Dh]: it shares key heads among query heads and divides by √Dh itself. It returns [T, Hq,
        Dh], and `proj` takes the heads of a token end to end.
        """
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, Dh]
        q, k, v = qkv.split(self.heads, dim=1)  # [T, Hq, Dh], [T, Hkv, Dh] twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, angles), rotate(k, angles), v)  # [T, Hq, Dh]
        return self.proj(out.flatten(1))  # [T, D]


class MLP(Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), x[T, D] -> [T, D]. One layer, `gate_up`, computes gate and up."""

    def __init__(self, config: LlamaConfig, **factory) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, 2 * inner, bias=bias, **factory)
        self.down = Linear(inner, config.hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, D] -> [T, D]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, inner] each
        return self.down(F.silu(gate) * up)  # [T, D]


class Block(Module):
    """Attention, then the MLP: each adds to x[T, D] its result for the normalised x."""

    def __init__(self, layer: int, config: LlamaConfig, **factory) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps, **factory)
        self.norm1, self.attention = norm(), Attention(layer, config, **factory)
        self.norm2, self.mlp = norm(), MLP(config, **factory)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """x[T, D] -> [T, D], through one call of `attend`."""
        x = x + self.attention(self.norm1(x), angles, attend)  # tokens exchange information
        return x + self.mlp(self.norm2(x))  # each token is computed by itself


class Model(LanguageModel):
    """Llama or Qwen3. The parameters are uninitialised until the loader fills them."""

    config: LlamaConfig
    head: nn.Linear  # [T, D] -> [T, V]
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
        """token_ids[T], positions[T] -> hidden[T, D], after the last norm: the input of `logits`.

        Raises ValueError for a token id outside the vocabulary. The message names the first such id and the
        last id that the model has. On a GPU the caller must check the ids. Any position is accepted: the
        caller keeps to config.max_positions.
        """
        try:
            x = self.embedded(token_ids)  # [T, D]
        except IndexError:
            vocab_size = self.config.vocab_size
            outside = next(id for id in token_ids.tolist() if not 0 <= id < vocab_size)
            raise ValueError(
                f"token id {outside} is out of range: this model has token ids 0 to {vocab_size - 1}"
            ) from None
        angles = self.config.rope.angles(positions, self.frequencies, x.dtype)
        for block in self.blocks:
            x = block(x, angles, attend)
        return self.norm(x)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids[T] -> [T, D]: what goes into the first block."""
        return self.embed(token_ids)


def places(config: LlamaConfig) -> dict[str, Place]:
    """Hugging Face's tensor names, without the prefix `model.`, and their places in `Model`.

    embed_tokens, norm and lm_head are our embed, norm and head. A head that is tied to the embedding has no
    entry, since no file needs its tensor. The tensors of layers.N are in our blocks.N:
        self_attn.q_proj, k_proj, v_proj       attention.qkv: rows of Hq heads, then of Hkv, then of Hkv
        self_attn.o_proj                       attention.proj
        mlp.gate_proj, up_proj                 mlp.gate_up: the rows of gate_proj, then of up_proj
        mlp.down_proj                          mlp.down
        input_layernorm                        norm1
        post_attention_layernorm               norm2
        self_attn.q_norm, k_norm               attention.q_norm, k_norm (only with config.qk_norm)
    Each of them has a weight, which is [out, in] in the file and in our model. A linear layer also has a
    bias, with the same rows as its weight, if config.attention_bias or config.mlp_bias says so. A tensor that
    fills a whole parameter has `rows` None.
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
        for theirs, (ours, rows, has_bias) in linears.items():
            leaves = ["weight", "bias"] if has_bias else ["weight"]
            for leaf in leaves:
                table[f"layers.{i}.{theirs}.{leaf}"] = Place(f"blocks.{i}.{ours}.{leaf}", rows)
        for theirs, ours in norms.items():
            table[f"layers.{i}.{theirs}.weight"] = Place(f"blocks.{i}.{ours}.weight")
    return table
