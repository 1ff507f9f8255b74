"""Loading adapters on demand, as `LLM` and `AsyncLLMEngine` do: at the first request for an adapter. Part 18.

Promises that an adapter's files are read before a request with this adapter is queued, and not again while
the adapter is loaded. Up to `max_loras` adapters stay loaded, and more if unfinished requests have them. The
least recently requested adapter that no unfinished request has is unloaded first.
"""

from collections import OrderedDict

from engine.decoding.params import ParameterError
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterManager
from engine.lora.request import LoRARequest
from engine.models.config import ModelConfig


class OnDemand:
    """Passed as `LLMEngine(adapters=)` if requests have a LoRARequest. No other code may load or unload
    adapters with the same manager.
    """

    def __init__(self, manager: AdapterManager, config: ModelConfig) -> None:
        """`config` is that of the model, which adapters must fit."""
        self.manager, self.config = manager, config
        self._loaded: OrderedDict[str, LoRARequest] = OrderedDict()  # by name, the least recently used first

    def key(self, adapter: LoRARequest) -> str:
        """Load the adapter if it is not loaded, and return its key for the engine.

        Raises ParameterError if a loaded LoRARequest has the same name or number and is not equal, and
        CheckpointError if the adapter's files cannot be read (`read_adapter`).
        """
        for other in self._loaded.values():
            is_named_alike = other.lora_name == adapter.lora_name or other.lora_int_id == adapter.lora_int_id
            if is_named_alike and other != adapter:
                raise ParameterError("lora_request", f"{adapter} contradicts {other}")
        name, slots = adapter.lora_name, self.manager.slots
        if name not in self._loaded:
            weights = read_adapter(adapter.lora_path, self.config, slots.max_lora_rank, slots.dtype)
            self.manager.load(name, weights)
            self._loaded[name] = adapter
        self._loaded.move_to_end(name)
        if len(self._loaded) > slots.max_loras:
            self._unload_idle(len(self._loaded) - slots.max_loras, requested=name)
        return self.manager.key(name)

    def _unload_idle(self, count: int, requested: str) -> None:
        """Unload up to `count` adapters that no unfinished request has, the least recently used first. The
        adapter `requested` stays loaded.
        """
        in_use = self.manager.keys_in_use()
        others = [name for name in self._loaded if name != requested]
        idle = [name for name in others if self.manager.key_of[name] not in in_use]
        for name in idle[:count]:
            self.manager.unload(name)
            del self._loaded[name]
