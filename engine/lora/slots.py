"""Slots for a fixed number of adapters in a model's linear layers. Part 18.

Promises that an adapter that lies in a slot is computed for the rows of requests that name it, and for no
others; that its place never moves, so that a graph stays valid while adapters come and go. Knows no names
that users know, and not when an adapter may go: the manager does.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from engine.layers.replace import LinearLayer, replace_linears
from engine.lora.adapter import Adapter, targets_of
from engine.lora.layer import LoRALinear
from engine.lora.rows import GroupedRows, Rows
from engine.models.language_model import LanguageModel
from engine.requests.batch import Batch


class AdapterSlots:
    """`max_loras` slots, for ranks up to `max_lora_rank`."""

    def __init__(self, max_loras: int, max_lora_rank: int, max_tokens: int) -> None:
        """`max_tokens`: rows of the largest step. Raises ValueError."""
        for name, value in {"max_loras": max_loras, "max_lora_rank": max_lora_rank}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number from 1 on is accepted")
        self.max_loras, self.max_lora_rank, self.max_tokens = max_loras, max_lora_rank, max_tokens
        self.slot_of: dict[str, int] = {}  # by key: which slot an adapter lies in
        self.layers: dict[str, LoRALinear] = {}  # by name: the layers that are wrapped
        self.rows: Rows = GroupedRows()
        self.on_put: Callable[[int, Adapter], None] | None = None  # told what is laid where (a recording)

    def num_bytes(self, model: LanguageModel) -> int:
        """The bytes that all slots will take, once the model's linear layers are wrapped.

        Each rank takes a row of A and a column of B; and it does so for each part of a layer, where several
        of Hugging Face's layers are one here.
        """
        parts = _parts(model)
        numbers_per_rank = sum(
            parts[name] * (layer.in_features + layer.out_features)
            for name, layer in model.named_modules()
            if name in parts and isinstance(layer, LinearLayer)
        )
        bytes_per_number = next(model.parameters()).element_size()
        return self.max_loras * self.max_lora_rank * numbers_per_rank * bytes_per_number

    def wrap(self, model: LanguageModel) -> LanguageModel:
        """Wrap the model's linear layers, in place; returns the model. For `load_model(transform=)`, behind
        merging and quantization, before packing.
        """
        like = next(model.parameters())
        self.rows = self._rows(like.device)
        parts = _parts(model)

        def make(name: str, linear: nn.Module) -> nn.Module:
            if name not in parts:
                return linear
            assert isinstance(linear, LinearLayer)  # replace_linears hands over no other
            rows, rank = self.rows, self.max_lora_rank
            self.layers[name] = LoRALinear(linear, rows, self.max_loras, parts[name], rank, like)
            return self.layers[name]

        return replace_linears(model, make)

    def _rows(self, device: torch.device) -> Rows:
        if device.type == "cpu":
            return GroupedRows()
        from engine.lora.tiles import TiledRows  # here: triton is optional

        return TiledRows(self.max_tokens, self.max_loras, device)

    @property
    def free(self) -> list[int]:
        """The slots that no adapter lies in, the lowest first."""
        return sorted(set(range(self.max_loras)) - set(self.slot_of.values()))

    def put(self, key: str, adapter: Adapter) -> None:
        """Lay an adapter into a free slot. Raises ValueError: there is none, or it is too small."""
        if not self.free:
            raise ValueError(f"{key}: all {self.max_loras} slots are taken")
        if adapter.rank > self.max_lora_rank:
            raise ValueError(f"{key}: rank={adapter.rank}: at most {self.max_lora_rank} is accepted")
        slot = self.free[0]
        self.lay(slot, adapter)
        self.slot_of[key] = slot
        if self.on_put:
            self.on_put(slot, adapter)

    def lay(self, slot: int, adapter: Adapter) -> None:
        """What lay there is overwritten."""
        for name, layer in self.layers.items():
            layer.put(slot, adapter.layers.get(name, ()), adapter.scale)

    def drop(self, key: str) -> None:
        """The slot is free; what lies in it is read by nobody."""
        del self.slot_of[key]

    def prepare(self, batch: Batch) -> None:
        """Before a pass: whose row is whose."""
        self.rows.fill(batch.adapters, batch.query_start)


def _parts(model: LanguageModel) -> Counter[str]:
    """Of each linear layer that may be adapted, by its name: how many of Hugging Face's are one in it."""
    return Counter(target.layer for target in targets_of(model.config).values())
