"""A continuous scheduler over memory in blocks, without tensors."""

from engine.requests.listeners import Listener, Listeners
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import BlockCache


def scheduler(max_num_seqs=4, budget=16, blocks=100, block_tokens=4, listeners=None) -> ContinuousScheduler:
    made = ContinuousScheduler(BlockCache(blocks, block_tokens), max_num_seqs, budget)
    made.listeners = listeners or Listeners()
    return made


class Told(Listener):
    """The requests that were preempted, as listeners are told."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_preempt(self, request) -> None:
        self.names.append(request.id)
