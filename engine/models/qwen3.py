"""Qwen3: Llama's body, with queries and keys normed head by head before they are turned. Part 20.

The norm (QK-norm) bounds the scores of attention, whatever the weights. Promises Hugging Face's numbers for
dense Qwen3 checkpoints (0.6B to 32B). Source: Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388.
"""

from dataclasses import replace

from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import PREFIX, REDUNDANT, LlamaConfig, Model, places

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Where config.json does not say, as in Hugging Face's Qwen3Config:
HEAD_DIM = 128
MAX_WINDOW_LAYERS = 28


def config_from(raw: dict) -> LlamaConfig:
    """Qwen3's config.json in our vocabulary. Raises CheckpointError: as Llama's, or for a sliding window."""
    _refuse_sliding_windows(raw)
    config = llama.config_from({"head_dim": HEAD_DIM} | raw)
    return replace(config, qk_norm=True, raw=raw)


def _refuse_sliding_windows(raw: dict) -> None:
    """Raises CheckpointError: some layers see only their last tokens. `layer_types` names each layer's kind;
    where a file has none, layers from `max_window_layers` on have the window, if `use_sliding_window` is
    true.
    """
    window = raw.get("use_sliding_window") and raw.get("sliding_window")
    if layer_types := raw.get("layer_types"):
        unsupported = sorted(set(layer_types) - {"full_attention"})
    elif window and raw.get("max_window_layers", MAX_WINDOW_LAYERS) < raw["num_hidden_layers"]:
        unsupported = ["sliding_attention"]
    else:
        unsupported = []
    if unsupported:
        raise CheckpointError(
            f"layer_types has {', '.join(unsupported)}, which is not supported, only full_attention"
            + (f" (use_sliding_window with sliding_window={window})" if window else "")
        )
