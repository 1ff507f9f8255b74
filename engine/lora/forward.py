"""A forward pass that knows whose rows are whose. Part 18.

Wraps any forward pass, also one that replays graphs: the rows are written into their buffer before it runs.
"""

from torch import Tensor

from engine.batch import Batch
from engine.lora.slots import AdapterSlots
from engine.scoring import ScoringForward


class AdapterForward:
    """As the one it wraps; every batch passes the slots first."""

    def __init__(self, forward: ScoringForward, slots: AdapterSlots) -> None:
        self.forward, self.slots = forward, slots

    def __call__(self, batch: Batch) -> Tensor:
        """logits[R, V] of the rows the batch wants."""
        self.slots.prepare(batch)
        return self.forward(batch)

    def hidden(self, batch: Batch) -> Tensor:
        """hidden[R, D] of these rows."""
        self.slots.prepare(batch)
        return self.forward.hidden(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V]: the output layer has no adapter."""
        return self.forward.logits(hidden)
