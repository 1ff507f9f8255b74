"""Pages (Part 12) with an `attend` that has extras: windows, soft caps, sinks, scales. Extension C.

The pages, their plan and their copies are those of a `PageMemory`. Only the attention differs: every layer
stores its new keys and values in the pages, and a kernel that supports all extras reads them there.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.attention.extras import AttentionExtras, ExtrasAttend
from engine.attention.extras_paged import GatheredWithExtras, MakeExtrasPlan
from engine.attention.paged import Store, store_by_index
from engine.cache.memory import PageMemory
from engine.machine.device import on_device
from engine.requests.batch import Batch, Copy


class ExtrasMemory:
    """A `KVMemory` (manager.py) over the pages of `memory`. All steps of a model with extras attend through
    it, and none through `memory` itself.
    """

    def __init__(
        self,
        memory: PageMemory,
        make_plan: MakeExtrasPlan = GatheredWithExtras,
        store: Store = store_by_index,
    ) -> None:
        """`make_plan` makes the attention of a step, and `store` writes new keys and values into pages."""
        self.memory, self._make_plan, self._store = memory, make_plan, store

    def apply(self, copies: Sequence[Copy]) -> None:
        """Make a step's copies, in order. A copy that was made before is left out."""
        self.memory.apply(copies)

    def attention(self, batch: Batch) -> ExtrasAttend:
        """The `attend` of one step. What is the same in every layer is computed here, once."""
        all_keys, all_values = self.memory.keys, self.memory.values  # by layer
        plan = self._make_plan(self.memory.pages(batch), tuple(batch.query_start), all_keys[0])
        (slots,) = on_device(all_keys[0].device, batch.slots)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, extras: AttentionExtras) -> Tensor:
            keys, values = all_keys[layer], all_values[layer]
            self._store(k, v, keys, values, slots)
            return plan(q, keys, values, extras)

        return ExtrasAttend(attend)
