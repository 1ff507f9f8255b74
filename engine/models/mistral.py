"""Mistral: Llama, with a sliding window in every layer if config.json has one. Extension C.

Promises Hugging Face's numbers. Source: Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
"""

from engine.models import llama
from engine.models.llama import PREFIX, REDUNDANT, places
from engine.models.windowed import Model, WindowedConfig, with_windows

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "places"]

# Defaults of Hugging Face's MistralConfig, for fields that config.json leaves out.
DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}  # as in the library, whatever config.json says


def config_from(raw: dict) -> WindowedConfig:
    """Translate Mistral's config.json, given as `raw`. Raises errors as `llama.config_from` and
    `with_windows` do.
    """
    settings = DEFAULTS | raw | NO_BIASES
    config = llama.config_from(settings)
    return with_windows(config, [settings["sliding_window"]] * config.num_layers)
