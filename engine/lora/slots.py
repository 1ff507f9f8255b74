"""Room for a fixed number of adapters in a model's linear layers. Part 18.

Promises that an adapter that lies in a slot is computed for the rows of requests that name it, and for no
others; that its place never moves, so that a graph stays valid while adapters come and go. Knows no names
that users know, and not when an adapter may go: the manager does.
"""

from collections import Counter

import torch
from torch import nn

from engine.batch import Batch
from engine.layers.replace import replace_linears
from engine.lora.adapter import Adapter, targets_of
from engine.lora.layer import LoRALinear
from engine.lora.rows import NOBODY, GroupedRows, Rows


class AdapterSlots:
    """`max_loras` slots, for ranks up to `max_lora_rank`."""

    def __init__(self, max_loras: int, max_lora_rank: int, max_tokens: int) -> None:
        """`max_tokens`: rows of the largest step. Raises ValueError."""
        for name, value in {"max_loras": max_loras, "max_lora_rank": max_lora_rank}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number from 1 on is accepted")
        self.max_loras, self.max_lora_rank, self.max_tokens = max_loras, max_lora_rank, max_tokens
        self.slot_of: dict[str, int] = {}  # by key: what lies where
        self.layers: dict[str, LoRALinear] = {}
        self.rows: Rows | None = None

    def num_bytes(self, model: nn.Module) -> int:
        """That all slots take, once its linear layers are wrapped."""
        parts = _parts(model)
        layers = {name: model.get_submodule(name) for name in parts}
        numbers = sum(parts[name] * (one.in_features + one.out_features) for name, one in layers.items())
        return self.max_loras * self.max_lora_rank * numbers * next(model.parameters()).element_size()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model's linear layers, in place; returns the model. For `load_model(transform=)`, behind
        merging and quantization, before packing.
        """
        like = next(model.parameters())
        self.rows = self._rows(like.device)
        parts = _parts(model)

        def make(name: str, linear: nn.Module) -> nn.Module:
            if name not in parts:
                return linear
            made = LoRALinear(linear, self.rows, self.max_loras, parts[name], self.max_lora_rank, like)
            self.layers[name] = made
            return made

        return replace_linears(model, make)

    def _rows(self, device: torch.device) -> Rows:
        if device.type == "cpu":
            return GroupedRows()
        from engine.lora.tiles import TiledRows  # here: triton is optional

        return TiledRows(self.max_tokens, self.max_loras, device)

    @property
    def free(self) -> list[int]:
        return sorted(set(range(self.max_loras)) - set(self.slot_of.values()))

    def put(self, key: str, adapter: Adapter) -> None:
        """Lay an adapter into a free slot. Raises ValueError: there is none, or it is too small."""
        if not self.free:
            raise ValueError(f"{key}: all {self.max_loras} slots are taken")
        if adapter.rank > self.max_lora_rank:
            raise ValueError(f"{key}: rank={adapter.rank}: at most {self.max_lora_rank} is accepted")
        slot = self.free[0]
        for name, layer in self.layers.items():
            layer.put(slot, adapter.layers.get(name, ()), adapter.scale)
        self.slot_of[key] = slot

    def drop(self, key: str) -> None:
        """The slot is free; what lies in it is read by nobody."""
        del self.slot_of[key]

    def prepare(self, batch: Batch) -> None:
        """Before the forward pass: whose row is whose."""
        slots = [NOBODY if key is None else self.slot_of[key] for key in batch.adapters]
        self.rows.fill(slots, batch.query_start)


def _parts(model: nn.Module) -> Counter[str]:
    """Of each linear layer that may be adapted: how many of Hugging Face's are one in it."""
    return Counter(target.layer for target in targets_of(model.config).values())
