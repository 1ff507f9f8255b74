"""Qwen2 and Qwen2.5: Llama, with biases of queries, keys and values, and with windows if config.json says so.
Extension C.

Promises Hugging Face's numbers. Source: Qwen2 Technical Report 2024, https://arxiv.org/abs/2407.10671.
"""

from typing import cast

import torch

from engine.models import llama, windowed
from engine.models.llama import PREFIX, REDUNDANT
from engine.models.weights import Place
from engine.models.windowed import FULL, SLIDING, WindowedConfig, windows_of, with_windows

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Defaults of Hugging Face's Qwen2Config, for fields that config.json leaves out.
DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
# What the library's model does, whatever config.json says. A `head_dim` of None is D / Hq, as in Llama.
FIXED = {"attention_bias": True, "mlp_bias": False, "head_dim": None}


def config_from(raw: dict) -> WindowedConfig:
    """Translate Qwen2's config.json, given as `raw`. Raises errors as `llama.config_from`, `windows_of` and
    `with_windows` do.
    """
    settings = DEFAULTS | raw | FIXED
    config = llama.config_from(settings)
    window = settings["sliding_window"] if settings.get("use_sliding_window") else None
    layer_types = settings.get("layer_types")
    if not layer_types:  # then the layers from `max_window_layers` on have a window
        first_sliding = settings["max_window_layers"]
        layer_types = [SLIDING if i >= first_sliding else FULL for i in range(config.num_layers)]
    return with_windows(config, windows_of(layer_types, window, config.num_layers))


class Model(windowed.Model):
    """A Llama with biases in `qkv`, but not in attention's output layer."""

    def __init__(
        self, config: WindowedConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, device, dtype)
        for block in cast(list[llama.Block], list(self.blocks)):
            block.attention.proj.bias = None  # type: ignore[assignment]  # removes it (weights.Module)


def places(config: WindowedConfig) -> dict[str, Place]:
    """Llama's places, without a bias of attention's output layer."""
    return {name: place for name, place in llama.places(config).items() if not name.endswith("o_proj.bias")}
