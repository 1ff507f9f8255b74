"""Llama with a sliding window in some layers: what Mistral and Qwen2 share. Extension C.

In a layer with a window, a query sees only the last keys, so its attention costs the same however long the
text is. Source: Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.extras import AttentionExtras, bind_extras
from engine.attention.interface import Attend
from engine.models import llama
from engine.models.checkpoint import CheckpointError
from engine.models.llama import LlamaConfig

# Kinds of layers in Hugging Face's `layer_types`: without and with a window.
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowedConfig(LlamaConfig):
    """A LlamaConfig with the window of each layer."""

    windows: tuple[int | None, ...] = ()  # [L]: a layer sees this many last tokens; None: it sees all


def windows_of(layer_types: Sequence[str], window: int | None, num_layers: int) -> list[int | None]:
    """The windows[L] of layers of these kinds: `window` for SLIDING, and None for FULL.

    Raises CheckpointError for another kind, or if there are not `num_layers` kinds.
    """
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise CheckpointError(
            f"layer_types has {', '.join(unknown)}, which is not supported, only {FULL}, {SLIDING}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types names {len(layer_types)} layers, and the model has {num_layers}")
    return [window if kind == SLIDING else None for kind in layer_types]


def with_windows(config: LlamaConfig, windows: Sequence[int | None]) -> WindowedConfig:
    """The config with these windows[L]. A window of `max_positions` tokens or more hides nothing: it becomes
    None.

    Raises CheckpointError for a window that is no whole number from 1 on.
    """
    needed_windows: list[int | None] = []
    for window in windows:
        if window is not None and (type(window) is not int or window < 1):
            raise CheckpointError(f"sliding_window={window!r}: a whole number from 1 on is accepted")
        hides_nothing = window is None or window >= config.max_positions
        needed_windows.append(None if hides_nothing else window)
    changes: dict[str, Any] = {
        "windows": tuple(needed_windows),
        "window": largest_window(needed_windows),
        "attention_extras": any(window is not None for window in needed_windows),
    }
    return WindowedConfig(**vars(config) | changes)  # the fields of `config`, but for `changes`


def largest_window(windows: Sequence[int | None]) -> int | None:
    """How many of the last tokens a cache must keep for layers with these windows[L]; None: all tokens, since
    some layer sees all.
    """
    if not windows or None in windows:
        return None
    return max(window for window in windows if window is not None)


class Model(llama.Model):
    """A Llama whose layers may have windows."""

    def __init__(
        self, config: WindowedConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, device, dtype)
        self.extras = [AttentionExtras(window=window) for window in config.windows]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As Llama's. If a layer has a window, `attend` must be one that has windows; otherwise it raises
        ValueError.
        """
        if self.config.attention_extras:
            attend = bind_extras(attend, self.extras)
        return super().forward(token_ids, positions, attend)
