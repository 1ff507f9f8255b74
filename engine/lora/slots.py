"""Slots for a fixed number of adapters in a model's linear layers. Part 18.

A request may run once its adapter has a slot. The scheduler gets the slot with `assign`, and `prepare` copies
the adapter's weights into the slot before the step that needs them.

Promises: an adapter changes only the rows of requests that have its key. The adapter of a running request
never loses its slot. A slot's address never changes, so a CUDA graph stays valid while adapters come and go.
This module does not know the names that users give to adapters.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.layers.replace import LinearLayer, replace_linears
from engine.lora.adapter import Adapter, targets_of
from engine.lora.layer import LoRALinear
from engine.lora.rows import AdapterRows, GroupedRows
from engine.models.language_model import LanguageModel
from engine.requests.batch import Batch
from engine.requests.request import Request


class AdapterSlots:
    """`max_loras` slots for adapters of ranks up to `max_lora_rank`, and the adapters that may get a slot."""

    def __init__(
        self,
        max_loras: int,
        max_lora_rank: int,
        max_tokens: int,
        shard: Callable[[Adapter], Adapter] | None = None,
    ) -> None:
        """`max_tokens`: the number of rows of the largest step. `shard` gives this device's part of an
        adapter, if the model is one device's part (Extension A). Raises ValueError if `max_loras` or
        `max_lora_rank` is not a whole number from 1 on.
        """
        for name, value in {"max_loras": max_loras, "max_lora_rank": max_lora_rank}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number from 1 on is accepted")
        self.max_loras, self.max_lora_rank, self.max_tokens = max_loras, max_lora_rank, max_tokens
        self.adapters: dict[str, Adapter] = {}  # key -> adapter, in the host's memory
        self.slot_of: dict[str, int] = {}  # key -> slot, if there is one; least recently assigned first
        self._to_write: dict[int, Adapter] = {}  # slot -> its adapter, if the weights are not copied yet
        self.layers: dict[str, LoRALinear] = {}  # dotted name -> wrapped layer
        self.rows: AdapterRows = GroupedRows()  # `wrap` replaces this record on a GPU
        self.dtype = torch.float32  # of the numbers in the slots
        self._shard = shard
        # Each is called with a slot and its adapter, not cut by `shard`, when the adapter gets the slot.
        self.on_assign: list[Callable[[int, Adapter], None]] = []

    def num_bytes(self, model: LanguageModel) -> int:
        """The bytes that all slots will take once the model's linear layers are wrapped.

        A rank of a layer takes a row of A (`in` numbers) and a column of B (`out` numbers). A layer of ours
        that fuses several of Hugging Face's layers has so many times the ranks.
        """
        num_parts = _num_parts(model)
        numbers_per_rank = sum(
            num_parts[name] * (layer.in_features + layer.out_features)
            for name, layer in model.named_modules()
            if name in num_parts and isinstance(layer, LinearLayer)
        )
        bytes_per_number = next(model.parameters()).element_size()
        return self.max_loras * self.max_lora_rank * numbers_per_rank * bytes_per_number

    def wrap(self, model: LanguageModel) -> LanguageModel:
        """Wrap the model's linear layers in place, and return the model. Used as `load_model(transform=)`,
        after merging and quantization, and before packing.
        """
        like = next(model.parameters())
        self.rows, self.dtype = self._make_rows(like.device), like.dtype
        num_parts = _num_parts(model)

        def make(name: str, linear: nn.Module) -> nn.Module:
            if name not in num_parts:
                return linear
            assert isinstance(linear, LinearLayer)  # replace_linears calls `make` with linear layers only
            layer = LoRALinear(
                linear,
                self.rows,
                self.max_loras,
                num_parts=num_parts[name],
                max_rank=self.max_lora_rank,
                like=like,
            )
            self.layers[name] = layer
            return layer

        return replace_linears(model, make)

    def _make_rows(self, device: torch.device) -> AdapterRows:
        """The record of rows for this device."""
        if device.type == "cpu":
            return GroupedRows()
        from engine.lora.tiles import TiledRows  # imported here, since the package triton is optional

        return TiledRows(self.max_tokens, self.max_loras, device)

    def add(self, key: str, adapter: Adapter) -> None:
        """Keep an adapter in the host's memory, so that requests may have it. Raises ValueError if the
        adapter's rank is above `max_lora_rank`.
        """
        if adapter.rank > self.max_lora_rank:
            raise ValueError(f"rank={adapter.rank}: at most max_lora_rank={self.max_lora_rank} is accepted")
        self.adapters[key] = adapter

    def remove(self, key: str) -> None:
        """Drop an adapter that no unfinished request has, and free its slot. Raises KeyError if the key is
        unknown.
        """
        del self.adapters[key]
        slot = self.slot_of.pop(key, None)
        if slot is not None:
            self._to_write.pop(slot, None)  # a slot whose weights are copied already is not in `_to_write`

    def assign(self, key: str, running: Sequence[Request]) -> bool:
        """Give an adapter a slot, for a request that is about to join the `running` requests.

        - An adapter that has a slot keeps its slot.
        - Otherwise the adapter gets the lowest free slot (`_occupy`).
        - If no slot is free, the adapter gets the slot of an adapter that no running request has. Among
          several such adapters, the least recently assigned adapter loses its slot.
        - If every slot's adapter has a running request, the result is False and nothing changes.

        `slot_of` keeps its keys in the order of their last call of `assign`: a call that returns True moves
        its key to the end.
        """
        if key not in self.slot_of:
            free = set(range(self.max_loras)) - set(self.slot_of.values())
            if not free:
                in_use = {request.adapter for request in running}
                idle = [other for other in self.slot_of if other not in in_use]
                if not idle:
                    return False
                free.add(self.slot_of.pop(idle[0]))
            self._occupy(min(free), key)
        self.slot_of[key] = self.slot_of.pop(key)
        return True

    def _occupy(self, slot: int, key: str) -> None:
        """Record that the adapter has the slot. `prepare` copies the weights before the next step."""
        self.slot_of[key] = slot
        self.write_later(slot, self.adapters[key])
        for callback in self.on_assign:
            callback(slot, self.adapters[key])

    def write_later(self, slot: int, adapter: Adapter) -> None:
        """Have the adapter copied to this slot before its next step."""
        self._to_write[slot] = adapter

    def prepare(self, batch: Batch) -> None:
        """Prepare a forward pass of this batch: copy weights that are not in their slots yet, and record each
        row's slot.

        If a copy fails (no memory, for example), this step fails, and the next step with the same adapter
        copies again.
        """
        for slot in self._to_write.keys() & set(batch.adapters):
            self.write(slot, self._to_write[slot])
            del self._to_write[slot]
        self.rows.fill(batch.adapters, batch.query_start)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter's weights into a slot, over the weights that the slot had."""
        if self._shard is not None:
            adapter = self._shard(adapter)
        for name, layer in self.layers.items():
            layer.write(slot, adapter.layers.get(name, ()), adapter.scale)


def _num_parts(model: LanguageModel) -> Counter[str]:
    """The number of Hugging Face's layers that each adaptable layer of ours fuses, by our layer's name."""
    return Counter(target.layer for target in targets_of(model.config).values())
