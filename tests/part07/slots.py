"""What the tests of slots share: sequences, and a memory of slots with its plan."""

from engine.cache.slots import SlotMemory
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.scheduling.scheduler import Queues


def sequence(name: str, token_ids=(1, 2, 3)) -> Request:
    params = SamplingParams()
    return Request(
        name, name, list(token_ids), len(token_ids), params, None, SamplingState(params, token_ids, [], 0)
    )


class Slots:
    """Memory and its plan."""

    def __init__(self, config, num_slots, slot_tokens=None, **options) -> None:
        self.memory = SlotMemory(config, num_slots, slot_tokens, **options)
        self.plan = self.memory.plan()
        self.admit, self.release = self.plan.admit, self.plan.release

    def take(self, *work) -> Batch:
        """A step of these (request, new tokens)."""
        return Queues(self.plan).make_step(work).batch

    def attention(self, *work):
        """Its `attend`."""
        return self.memory.attention(self.take(*work))
