"""Adapters that are loaded when a request first asks for them: `LLM` and `AsyncLLMEngine`. Part 18.

Promises that an adapter is read from its files before the request that asks for it is queued, and not again
as long as it is among the `max_loras` adapters that were asked for last, or an unfinished request has it.
"""

from engine.decoding.params import ParameterError
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterManager
from engine.lora.request import LoRARequest
from engine.models.config import ModelConfig


class OnDemand:
    """`LLMEngine(adapters=)` where requests ask with a LoRARequest. Only this object may load with its
    manager.
    """

    def __init__(self, manager: AdapterManager, config: ModelConfig) -> None:
        self.manager, self.config = manager, config
        self._loaded: dict[str, LoRARequest] = {}  # by name, the least recently used first

    def key(self, adapter: LoRARequest) -> str:
        """Load the adapter if it is not loaded; returns the engine's key. Raises ParameterError (another
        LoRARequest has the same name or number and is not equal), CheckpointError (the files).
        """
        for other in self._loaded.values():
            same_adapter = other.lora_name == adapter.lora_name or other.lora_int_id == adapter.lora_int_id
            if same_adapter and other != adapter:
                raise ParameterError("lora_request", f"{adapter} contradicts {other}")
        name, slots = adapter.lora_name, self.manager.slots
        if name not in self._loaded:
            weights = read_adapter(adapter.lora_path, self.config, slots.max_lora_rank, slots.dtype)
            self.manager.load(name, weights)
        self._loaded[name] = self._loaded.pop(name, adapter)  # now the most recently used: the last
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
