"""Adapters that come and go while requests run. Part 18.

Users know an adapter by its name. The engine knows it by a key, the name and a number that counts loads:
"poetry@1". A request gets its key when it is queued, and keeps it: its adapter stays the same whatever
happens to the name. The prefix cache finds keys and values by this key, too, so no other load gets them.

Promises: a request that is queued after `unload` cannot have the adapter; one that was queued before keeps it
to the end. An adapter is in the host's memory as long as a name stands for it or an unfinished request has
it. No call waits. To be called in the engine's thread, between two steps; any thread may read `key_of`.
"""

from engine.decoding.params import NotFoundError
from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.scheduling.scheduler import Scheduler


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # already_loaded, not_loaded


class AdapterManager:
    """Which adapter each name stands for. `LLMEngine(adapters=)` where requests ask by name."""

    def __init__(self, slots: AdapterSlots, scheduler: Scheduler) -> None:
        self.slots, self.scheduler = slots, scheduler
        self.key_of: dict[str, str] = {}  # by name
        self._loads = 0

    def key(self, name: str) -> str:
        """The key for a request that is queued now. Raises NotFoundError: no adapter has this name."""
        key = self.key_of.get(name)
        if key is None:
            raise NotFoundError("adapter", f"adapter {name!r} is not loaded")
        self._remove_unused()
        return key

    def load(self, name: str, adapter: Adapter, load_inplace: bool = False) -> str:
        """Give `name` this adapter. Returns the key that requests get from now on, which no other load ever
        had.

        `load_inplace`: a name that is taken gets this adapter instead; requests that were queued before keep
        theirs. Raises AdapterError (already_loaded: the name is taken) or ValueError (no slot has room for
        its rank); then nothing has changed.
        """
        if name in self.key_of and not load_inplace:
            raise AdapterError(f"adapter {name!r} is loaded already", "already_loaded")
        self._loads += 1
        key = f"{name}@{self._loads}"
        self.slots.add(key, adapter)
        self.key_of[name] = key  # one assignment: a thread that reads it gets the old key or the new one
        self._remove_unused()
        return key

    def unload(self, name: str) -> None:
        """No new request gets this adapter. Raises AdapterError (not_loaded): no adapter has this name."""
        if name not in self.key_of:
            raise AdapterError(f"adapter {name!r} is not loaded", "not_loaded")
        del self.key_of[name]
        self._remove_unused()

    def keys_in_use(self) -> set[str]:
        """Keys of the adapters that unfinished requests have, waiting or running."""
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        return {request.adapter for request in unfinished if request.adapter is not None}

    def _remove_unused(self) -> None:
        """Remove from the host's memory the adapters that neither a name nor an unfinished request has."""
        nameless = self.slots.adapters.keys() - self.key_of.values()
        if nameless:
            for key in nameless - self.keys_in_use():
                self.slots.remove(key)
