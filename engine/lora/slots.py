"""Slots for a fixed number of adapters in a model's linear layers. Part 18.

A request may run once its adapter has a slot: the scheduler asks for one with `assign`, and `prepare` copies
the adapter's weights there before the step that needs them. Promises that an adapter is computed for the rows
of requests that have its key, and for no others; that no running request's adapter loses its slot; and that a
slot's address never changes, so that a graph stays valid while adapters come and go. Does not know the names
that users have for adapters.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.layers.replace import LinearLayer, replace_linears
from engine.lora.adapter import Adapter, targets_of
from engine.lora.layer import LoRALinear
from engine.lora.rows import GroupedRows, Rows
from engine.models.language_model import LanguageModel
from engine.requests.batch import Batch
from engine.requests.request import Request


class AdapterSlots:
    """`max_loras` slots, for ranks up to `max_lora_rank`; and the adapters that may get one."""

    def __init__(self, max_loras: int, max_lora_rank: int, max_tokens: int) -> None:
        """`max_tokens`: rows of the largest step. Raises ValueError."""
        for name, value in {"max_loras": max_loras, "max_lora_rank": max_lora_rank}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number from 1 on is accepted")
        self.max_loras, self.max_lora_rank, self.max_tokens = max_loras, max_lora_rank, max_tokens
        self.adapters: dict[str, Adapter] = {}  # by key, in the host's memory
        self.slot_of: dict[str, int] = {}  # by key, of adapters with a slot: least recently assigned first
        self._to_write: dict[int, Adapter] = {}  # by slot: its adapter, if not copied there yet
        self.layers: dict[str, LoRALinear] = {}  # by name: the layers that are wrapped
        self.rows: Rows = GroupedRows()
        self.dtype = torch.float32  # of the slots' numbers
        self.on_assign: Callable[[int, Adapter], None] | None = None  # called when an adapter gets a slot

    def num_bytes(self, model: LanguageModel) -> int:
        """The bytes that all slots will take, once the model's linear layers are wrapped.

        Each rank takes a row of A and a column of B, once for each of Hugging Face's layers that are one of
        ours.
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
        """Wrap the model's linear layers, in place; returns the model. For `load_model(transform=)`, after
        merging and quantization, before packing.
        """
        like = next(model.parameters())
        self.rows, self.dtype = self._make_rows(like.device), like.dtype
        num_parts = _num_parts(model)

        def make(name: str, linear: nn.Module) -> nn.Module:
            if name not in num_parts:
                return linear
            assert isinstance(linear, LinearLayer)  # replace_linears hands over no other
            rows, rank = self.rows, self.max_lora_rank
            self.layers[name] = LoRALinear(linear, rows, self.max_loras, num_parts[name], rank, like)
            return self.layers[name]

        return replace_linears(model, make)

    def _make_rows(self, device: torch.device) -> Rows:
        """The record of rows for this device."""
        if device.type == "cpu":
            return GroupedRows()
        from engine.lora.tiles import TiledRows  # here: triton is optional

        return TiledRows(self.max_tokens, self.max_loras, device)

    def add(self, key: str, adapter: Adapter) -> None:
        """Keep an adapter in the host's memory, so that requests may have it. Raises ValueError: its rank is
        above max_lora_rank.
        """
        if adapter.rank > self.max_lora_rank:
            raise ValueError(f"rank={adapter.rank}: at most max_lora_rank={self.max_lora_rank} is accepted")
        self.adapters[key] = adapter

    def remove(self, key: str) -> None:
        """Drop an adapter that no unfinished request has. Its slot, if it has one, becomes free."""
        del self.adapters[key]
        if key in self.slot_of:
            self._to_write.pop(self.slot_of.pop(key), None)

    def assign(self, key: str, running: Sequence[Request]) -> bool:
        """Give an adapter a slot, for a request that is about to join the `running` ones. False: there is
        none now, and nothing has changed.

        - An adapter that has a slot keeps it.
        - Else it gets a free slot (`_occupy`), the lowest first; or, if none is free, the slot of an adapter
          that no running request has. Of several such, the one that was assigned longest ago loses its slot.
        - When each slot's adapter has a running request, the answer is False.

        `slot_of` has the keys in the order in which they were assigned last: this one is its last now.
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
        """Make the slot this adapter's. Its weights are copied there before its next step (`prepare`)."""
        self.slot_of[key] = slot
        self._to_write[slot] = self.adapters[key]
        if self.on_assign:
            self.on_assign(slot, self.adapters[key])

    def prepare(self, batch: Batch) -> None:
        """Before a pass: copy the weights that its slots do not have yet, and tell the layers each row's
        slot.

        A copy that fails (no memory, say) fails this step; the next step that needs it tries it again.
        """
        for slot in self._to_write.keys() & set(batch.adapters):
            self.write(slot, self._to_write[slot])
            del self._to_write[slot]
        self.rows.fill(batch.adapters, batch.query_start)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter's weights into a slot. What was there is overwritten."""
        for name, layer in self.layers.items():
            layer.write(slot, adapter.layers.get(name, ()), adapter.scale)


def _num_parts(model: LanguageModel) -> Counter[str]:
    """By the name of each linear layer that may be adapted: how many of Hugging Face's layers it is."""
    return Counter(target.layer for target in targets_of(model.config).values())
