"""The KV cache of one sequence: keys and values are computed once, kept, and read again at every step.

The logits are the same as without a cache. The cache holds one sequence, which may only grow. Caches for many
sequences have slots (Part 7) or pages (Part 12). Part 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans, VarlenKernel
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel


class SingleCache:
    """Room for `max_tokens` keys and values in each layer, allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: VarlenKernel = dense_attention,
    ) -> None:
        """`kernel` computes the attention over the cache."""
        shape = (config.num_layers, max_tokens, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # [L, max_tokens, Hkv, Dh]
        self.values = torch.empty(shape, device=device, dtype=dtype)  # [L, max_tokens, Hkv, Dh]
        self.max_tokens = max_tokens
        self.length = 0  # tokens that count as stored in every layer: the next ones go behind them
        self._kernel = kernel

    @property
    def num_bytes(self) -> int:
        """The bytes of both tensors, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store T new tokens' k, v[T, Hkv, Dh] behind the old ones, then let q[T, Hq, Dh] see them all."""
        start, end = self.length, self.length + len(k)
        # 1. The new keys and values go behind the old ones.
        self.keys[layer, start:end] = k
        self.values[layer, start:end] = v
        # 2. T queries, `end` keys: the kernel aligns both at the end, so each query sees its own past. Keys
        #    and values are views[end, Hkv, Dh], so nothing is copied.
        keys, values = self.keys[layer, :end], self.values[layer, :end]
        return self._kernel(q, keys, values, Spans.of_one(end - start, end))

    def advance(self, num_tokens: int) -> None:
        """Note that the keys and values of `num_tokens` more tokens are stored, in every layer."""
        self.length += num_tokens


class CachedForward:
    """Computes logits by running only new tokens: the whole prompt once (prefill), then one token at a time
    (decode).

    Takes the place of Part 2's FullForward, for one request. Each call must pass a longer sequence that
    begins with the sequence of the call before.
    """

    def __init__(
        self, model: LanguageModel, max_tokens: int | None = None, kernel: VarlenKernel = dense_attention
    ) -> None:
        """`max_tokens` is the room of the cache; None takes what the model's longest sequence needs."""
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        if max_tokens is None:
            max_tokens = model.config.max_positions
        self.cache = SingleCache(model.config, max_tokens, parameter.device, parameter.dtype, kernel)

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        """All token ids so far -> logits[V] of the next one.

        Raises ValueError if no token is new, or if the cache has no room for all tokens. The message names
        three numbers: the tokens given, the tokens held, and the room. A refused call changes nothing.
        """
        start, end = self.cache.length, len(token_ids)
        if not start < end <= self.cache.max_tokens:
            raise ValueError(
                f"{end} tokens: the cache holds {start} and has room for {self.cache.max_tokens}"
            )
        # 1. Take only the tokens whose keys and values are not in the cache, at their true positions.
        new = torch.tensor(token_ids[start:], device=self.device)  # [T]
        positions = torch.arange(start, end, device=self.device)  # [T]
        # 2. Run the same model as without a cache: only `attend` knows the cache.
        hidden = self.model(new, positions, self.cache.attend)  # [T, D]
        self.cache.advance(end - start)
        return self.model.logits(hidden[-1:])[0]  # [V]
