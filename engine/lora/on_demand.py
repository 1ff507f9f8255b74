"""Adapters that are loaded when a request first asks for them: `LLM` and `AsyncLLMEngine`. Part 18.

Promises that an adapter is read when the request that asks for it is queued, in the same turn; and that it is
read once, as long as it is among the `max_loras` that were asked for last, or a request has it.
"""

from engine.decoding.params import ParameterError
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterManager
from engine.lora.request import LoRARequest
from engine.models.config import ModelConfig


class OnDemand:
    """An engine's `adapters`, where requests ask with a LoRARequest. Nobody else loads with its manager."""

    def __init__(self, manager: AdapterManager, config: ModelConfig) -> None:
        self.manager, self.config = manager, config
        self._loaded: dict[str, LoRARequest] = {}  # by name, the least recently used first

    def key(self, adapter: LoRARequest) -> str:
        """The engine's key of the adapter, which is loaded now. Raises ParameterError (it contradicts another
        LoRARequest), CheckpointError (the files).
        """
        for other in self._loaded.values():
            same = other.lora_name == adapter.lora_name or other.lora_int_id == adapter.lora_int_id
            if same and other != adapter:
                raise ParameterError("lora_request", f"{adapter} contradicts {other}")
        name, slots = adapter.lora_name, self.manager.slots
        if name not in self._loaded:
            weights = read_adapter(adapter.lora_path, self.config, slots.max_lora_rank, slots.dtype)
            self.manager.load(name, weights)
        self._loaded[name] = self._loaded.pop(name, adapter)
        if len(self._loaded) > slots.max_loras:
            self._unload_idle(len(self._loaded) - slots.max_loras, name)
        return self.manager.key(name)

    def _unload_idle(self, count: int, wanted: str) -> None:
        """Unload at most `count` adapters that no request has, least recently used first; never `wanted`."""
        in_use = self.manager.keys_in_use()
        idle = [name for name in self._loaded if self.manager.key_of[name] not in in_use and name != wanted]
        for name in idle[:count]:
            self.manager.unload(name)
            del self._loaded[name]
