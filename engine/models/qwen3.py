"""Qwen3: Llama's body, with queries and keys normed head by head before they are turned. Part 20.

The norm (QK-norm) bounds the scores of attention, whatever the weights. Promises Hugging Face's numbers for
dense Qwen3 checkpoints (0.6B to 32B). Source: Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388.
"""

from dataclasses import replace

from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import PREFIX, REDUNDANT, LlamaConfig, Model, places

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

HEAD_DIM = 128  # where config.json does not say


def config_from(raw: dict) -> LlamaConfig:
    """Qwen3's config.json in our vocabulary. Raises CheckpointError: as Llama's, or for a sliding window."""
    layers, windowed = raw["num_hidden_layers"], raw.get("use_sliding_window") and raw.get("sliding_window")
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if windowed and not raw.get("layer_types") and raw.get("max_window_layers", 28) < layers:
        kinds = ["sliding_attention"]
    if others := set(kinds) - {"full_attention"}:
        raise CheckpointError(
            f"layer_types has {', '.join(sorted(others))}, which is not supported, only full_attention"
            + (f" (use_sliding_window with sliding_window={windowed})" if windowed else "")
        )
    config = llama.config_from({"head_dim": HEAD_DIM} | raw)
    return replace(config, qk_norm=True, raw=raw)
