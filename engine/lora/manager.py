"""Loading and unloading adapters while requests run. Part 18.

Users know an adapter by its name. The engine knows an adapter by a key: the name and a number that counts
loads, such as "poetry@1". A request gets a key when the request is queued, and keeps the key. So its adapter
stays the same when the name is unloaded or gets another adapter. The prefix cache looks keys and
values up by the same key, so a request never gets keys and values of another load.

Promises: a request that is queued after `unload` cannot have the adapter, and a request that was queued
before `unload` keeps the adapter to its end. An adapter stays in the host's memory as long as a name stands
for the adapter or an unfinished request has it. No method waits. Methods must be called in the engine's
thread, between two steps; any thread may read `key_of`.
"""

from engine.decoding.params import NotFoundError
from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.scheduling.scheduler import Scheduler


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # "already_loaded" or "not_loaded"


class AdapterManager:
    """Which adapter each name stands for. Passed as `LLMEngine(adapters=)` if requests give a name."""

    def __init__(self, slots: AdapterSlots, scheduler: Scheduler) -> None:
        """`slots` holds the adapters, and `scheduler` knows which unfinished requests have them."""
        self.slots, self.scheduler = slots, scheduler
        self.key_of: dict[str, str] = {}  # name -> key
        self._num_loads = 0

    def key(self, name: str) -> str:
        """The key for a request that is queued now. Raises NotFoundError if no adapter has this name."""
        key = self.key_of.get(name)
        if key is None:
            raise NotFoundError("adapter", f"adapter {name!r} is not loaded")
        self._remove_unused()  # the end of a request calls nothing here
        return key

    def load(self, name: str, adapter: Adapter, load_inplace: bool = False) -> str:
        """Make `name` stand for this adapter. Returns the key that requests get from now on; every load has a
        new key.

        `load_inplace`: if the name is taken, replace its adapter; requests that are queued already keep the
        old adapter. Raises AdapterError ("already_loaded") if the name is taken and `load_inplace` is False,
        and ValueError if the adapter's rank is above the slots' max_lora_rank. After an error no name has
        changed.
        """
        if name in self.key_of and not load_inplace:
            raise AdapterError(f"adapter {name!r} is loaded already", "already_loaded")
        self._num_loads += 1
        key = f"{name}@{self._num_loads}"
        self.slots.add(key, adapter)
        self.key_of[name] = key  # one assignment: another thread reads the old key or the new key
        self._remove_unused()
        return key

    def unload(self, name: str) -> None:
        """Forget the name, so that no new request gets its adapter. Raises AdapterError ("not_loaded") if no
        adapter has this name.
        """
        if name not in self.key_of:
            raise AdapterError(f"adapter {name!r} is not loaded", "not_loaded")
        del self.key_of[name]
        self._remove_unused()

    def keys_in_use(self) -> set[str]:
        """Keys of the adapters of all unfinished requests, waiting or running."""
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        return {request.adapter for request in unfinished if request.adapter is not None}

    def _remove_unused(self) -> None:
        """Free the host's memory of each adapter that no name stands for and no unfinished request has."""
        nameless = self.slots.adapters.keys() - self.key_of.values()
        if nameless:
            for key in nameless - self.keys_in_use():
                self.slots.remove(key)
