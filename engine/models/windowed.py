"""Llama with a sliding window in some layers: what Mistral and Qwen2 share. Extension C.

A layer with a window sees the last keys only, so its attention costs the same however long the text is.
Source: Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.attention.extras import AttentionExtras, with_extras
from engine.attention.interface import Attend
from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import LlamaConfig


@dataclass(frozen=True)
class WindowedConfig(LlamaConfig):
    """A LlamaConfig with the window of each layer."""

    windows: tuple[int | None, ...] = ()  # [L]: a layer sees this many last tokens; None: it sees all


KINDS = {"full_attention": False, "sliding_attention": True}  # kind of layer -> whether it has a window


def windows_of(layer_types: Sequence[str], window: int | None, num_layers: int) -> list[int | None]:
    """The windows[L] of layers of these kinds. Raises CheckpointError for another kind, or for too few."""
    if unknown := sorted(set(layer_types) - set(KINDS)):
        raise CheckpointError(
            f"layer_types has {', '.join(unknown)}, which is not supported, only {', '.join(KINDS)}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types names {len(layer_types)} layers, and the model has {num_layers}")
    return [window if KINDS[kind] else None for kind in layer_types]


def with_windows(config: LlamaConfig, windows: Sequence[int | None]) -> WindowedConfig:
    """The config with these windows[L]. A window as long as the longest sequence is none.

    Raises CheckpointError for a window that is no whole number from 1 on.
    """
    for window in windows:
        if window is not None and not (type(window) is int and window > 0):
            raise CheckpointError(f"sliding_window={window!r}: a whole number from 1 on is accepted")
    windows = tuple(None if w is None or w >= config.max_positions else w for w in windows)
    settings = {spec.name: getattr(config, spec.name) for spec in fields(LlamaConfig)}
    settings["attention_extras"] = any(windows)
    longest = [w for w in windows if w is not None]
    settings["window"] = max(longest) if longest and len(longest) == len(windows) else None
    return WindowedConfig(**settings, windows=windows)


class Model(llama.Model):
    """A Llama whose layers may have windows."""

    def __init__(
        self, config: WindowedConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, device, dtype)
        self.extras = [AttentionExtras(window=window) for window in config.windows]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As Llama's. If a layer has a window, `attend` must have windows."""
        if self.config.attention_extras:
            attend = with_extras(attend, self.extras)
        return super().forward(token_ids, positions, attend)
