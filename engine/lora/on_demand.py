"""Adapters for offline use: loaded when somebody first asks for them. Part 18.

Promises that an adapter is read once, and that it is unloaded for another only when no request has it: the
least recently used goes first.
"""

from collections.abc import Sequence

from engine.decoding.params import ParameterError
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterError, AdapterManager
from engine.lora.request import LoRARequest
from engine.models.config import ModelConfig


class OnDemand:
    """Adapters by the LoRARequests that name them, over a manager that nobody else loads with."""

    def __init__(self, manager: AdapterManager, config: ModelConfig) -> None:
        self.manager, self.config = manager, config
        self._loaded: dict[str, LoRARequest] = {}  # by name; the last used stands last

    def keys(self, wanted: Sequence[LoRARequest | None]) -> list[str | None]:
        """The engine's key of each, None for none; the adapters are loaded then. Raises ParameterError (they
        contradict one another, or do not fit together), CheckpointError (the files).
        """
        named = {request.lora_name: request for request in wanted if request}
        for request in (*self._loaded.values(), *filter(None, wanted)):
            for other in named.values():
                same_name, same_id = (
                    request.lora_name == other.lora_name,
                    request.lora_int_id == other.lora_int_id,
                )
                if (same_name or same_id) and request != other:
                    raise ParameterError("lora_request", f"{other} contradicts {request}")
        max_loras = self.manager.slots.max_loras
        if len(named) > max_loras:
            message = f"lora_request names {len(named)} adapters: max_loras={max_loras} can be in one call"
            raise ParameterError("lora_request", message)
        for name, request in named.items():
            if name not in self._loaded:
                self._load(request, keep=named)
            self._loaded[name] = self._loaded.pop(name, request)
        return [None if request is None else self.manager.key_of[request.lora_name] for request in wanted]

    def _load(self, request: LoRARequest, keep: dict[str, LoRARequest]) -> None:
        manager = self.manager
        adapter = read_adapter(request.lora_path, self.config, manager.slots.max_lora_rank)
        while True:
            try:
                manager.load(request.lora_name, adapter)
                return
            except AdapterError as error:
                idle = (n for n in self._loaded if n not in keep and not manager.in_use(manager.key_of[n]))
                least_recent = next(idle, None)
                if error.code != "no_free_slot" or least_recent is None:
                    raise ParameterError("lora_request", str(error)) from None
                manager.unload(least_recent)
                del self._loaded[least_recent]
