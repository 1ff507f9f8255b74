"""Adapters that come and go while requests run. Part 18.

Users know an adapter by its name. The engine knows it by a key, the name and a number that counts loads:
"poetry@1". A request keeps the key it began with, so its adapter stays the same whatever happens to the name;
and keys and values computed under one key are never found under another.

Promises: whoever comes after `unload` cannot have the adapter; whoever came before keeps it to the end. The
slot is used again only when nobody unfinished needs what lies in it. Nothing here waits. To be called between
two steps, in the engine's thread.
"""

from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.scheduling.scheduler import Scheduler


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # already_loaded, not_loaded, no_free_slot


class AdapterManager:
    """Names, and what lies in the slots. Also the set of keys that new requests may have: the engine's
    `adapters`.
    """

    def __init__(self, slots: AdapterSlots, scheduler: Scheduler) -> None:
        self.slots, self.scheduler = slots, scheduler
        self.key_of: dict[str, str] = {}  # by name: what new requests get
        self._loads = 0

    def __contains__(self, key: object) -> bool:
        return key in self.key_of.values()

    def load(self, name: str, adapter: Adapter, load_inplace: bool = False) -> str:
        """Give `name` this adapter; the key that new requests get.

        1. A name that is taken is refused ("adapter 'poetry' is loaded already", already_loaded), unless
           `load_inplace`: then the name gets another adapter, and requests that have begun keep theirs.
        2. A free slot is needed. First every adapter is dropped that no name leads to any more and that no
           unfinished request needs; with `load_inplace`, what the name leads to now counts as such, too.
           Still none: refused (in the words of `_full`, no_free_slot).
        3. The adapter goes into its slot, under a key that never was before, and the name leads to it.

        Raises AdapterError: then the name leads where it did, and every named adapter is still there. Should
        laying it in fail after all, the name leads nowhere.
        """
        if name in self.key_of and not load_inplace:
            raise AdapterError(f"adapter {name!r} is loaded already", "already_loaded")
        named = {key for other, key in self.key_of.items() if other != name or not load_inplace}
        idle = [key for key in self.slots.slot_of if key not in named and not self.in_use(key)]
        if not self.slots.free and not idle:
            raise AdapterError(self._full(), "no_free_slot")
        for key in idle:
            self.slots.drop(key)
        self.key_of.pop(name, None)  # what it led to may be gone: should the next line fail, nobody gets that
        self._loads += 1
        key = f"{name}@{self._loads}"
        self.slots.put(key, adapter)
        self.key_of[name] = key
        return key

    def unload(self, name: str) -> None:
        """No new request gets it. Its slot waits for those that have it. Raises AdapterError: not_loaded."""
        if name not in self.key_of:
            raise AdapterError(f"adapter {name!r} is not loaded", "not_loaded")
        del self.key_of[name]

    def in_use(self, key: str) -> bool:
        """Whether an unfinished request, waiting or running, has this adapter."""
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        return any(request.adapter == key for request in unfinished)

    def _full(self) -> str:
        going = len(self.slots.slot_of) - len(self.key_of)
        still = f", {going} of them until requests that have them end" if going else ""
        return f"all {self.slots.max_loras} slots for adapters are taken{still} (max_loras)"
