"""Qwen3: the architecture of Llama, with a norm of each query head and key head before the rotation. Part 20.

This norm (QK-norm) keeps attention scores from growing with the size of the weights of queries and keys.
Promises Hugging Face's numbers for dense Qwen3 checkpoints (0.6B to 32B).
Source: Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388.
"""

from dataclasses import replace

from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import PREFIX, REDUNDANT, LlamaConfig, Model, places

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Defaults of Hugging Face's Qwen3Config, for fields that config.json leaves out.
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}


def config_from(raw: dict) -> LlamaConfig:
    """Translate Qwen3's config.json, given as `raw`, to a LlamaConfig.

    Raises CheckpointError for a sliding window, and as `llama.config_from` does.
    """
    settings = DEFAULTS | raw
    _refuse_sliding_windows(settings)
    return replace(llama.config_from(settings), qk_norm=True, raw=raw)


def _refuse_sliding_windows(settings: dict) -> None:
    """Raises CheckpointError if some layers attend only to a window of the last tokens.

    The setting `layer_types` names the kind of each layer. Without `layer_types`, the layers from
    `max_window_layers` on have a window if `use_sliding_window` is true and `sliding_window` is not null.
    """
    window = settings["sliding_window"] if settings.get("use_sliding_window") else None
    layer_types = settings.get("layer_types")
    unsupported: list[str] = []
    if layer_types:
        unsupported = sorted(set(layer_types) - {"full_attention"})
    elif window is not None and settings["max_window_layers"] < settings["num_hidden_layers"]:
        unsupported = ["sliding_attention"]
    if unsupported:
        cause = "" if window is None else f" (use_sliding_window with sliding_window={window})"
        raise CheckpointError(
            f"layer_types has {', '.join(unsupported)}, which is not supported, only full_attention{cause}"
        )
