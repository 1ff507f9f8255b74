"""A decode step of a model whose attention has extras, for CUDA graphs (Part 13). Extension C."""

import torch
from torch import Tensor

from engine.attention.extras import AttentionExtras, ExtrasAttend
from engine.kernels.extras_attention import extras_attention
from engine.kernels.store_kv import store_kv
from engine.models.language_model import LanguageModel


class ExtrasStep:
    """As `ModelStep` (graphs.py), with an `attend` that has extras."""

    def __init__(self, model: LanguageModel, keys: list[Tensor], values: list[Tensor]) -> None:
        """`keys` and `values` have a tensor [B, P, Hkv, Dh] for each layer."""
        self.model, self.keys, self.values = model, keys, values

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """tables[S, W], each other argument [S] -> logits[S, V]."""
        query_start = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)  # one query each

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            store_kv(k, v, keys, values, slots)
            return extras_attention(q, keys, values, tables, lens, query_start, max_queries=1, extras=extras)

        return self.model.logits(self.model(token_ids, positions, ExtrasAttend(attend)))
