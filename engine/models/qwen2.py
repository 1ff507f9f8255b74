"""Qwen2 and Qwen2.5: Llama, with biases of queries, keys and values, and with windows if config.json says so.
Extension C.

Promises Hugging Face's numbers. Source: Qwen2 Technical Report 2024, https://arxiv.org/abs/2407.10671.
"""

from typing import cast

import torch

from engine.models import llama, windowed
from engine.models.llama import PREFIX, REDUNDANT
from engine.models.weights import Place
from engine.models.windowed import KINDS, WindowedConfig, windows_of, with_windows

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Defaults of Hugging Face's Qwen2Config, for fields that config.json leaves out.
DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def config_from(raw: dict) -> WindowedConfig:
    """Translate Qwen2's config.json, given as `raw`. Raises CheckpointError as `llama.config_from` does."""
    settings = DEFAULTS | raw | {"attention_bias": True, "mlp_bias": False, "head_dim": None}
    config = llama.config_from(settings)
    window = settings["sliding_window"] if settings.get("use_sliding_window") else None
    first, layers = settings["max_window_layers"], range(config.num_layers)
    kinds = settings.get("layer_types") or [list(KINDS)[layer >= first] for layer in layers]
    return with_windows(config, windows_of(kinds, window, config.num_layers))


class Model(windowed.Model):
    """The biases are those of `qkv`; attention's output layer has none."""

    def __init__(self, config, device="cpu", dtype=torch.float32) -> None:
        super().__init__(config, device, dtype)
        for block in cast(list[llama.Block], list(self.blocks)):
            block.attention.proj.bias = None  # type: ignore[assignment]  # removes it (weights.Module)


def places(config: WindowedConfig) -> dict[str, Place]:
    """Llama's places, without a bias of attention's output layer."""
    return {name: place for name, place in llama.places(config).items() if not name.endswith("o_proj.bias")}
