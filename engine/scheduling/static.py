"""Static batching: a batch from the queue runs until its last request ends, then comes the next. Part 7.

What a step pays once (its calls, the reading of the weights) is paid once for the whole batch. What is wasted
is the places of requests that end early: they stay empty until the longest has finished. Part 8 mends that.
"""

from engine.cache.manager import KVCacheManager
from engine.requests.step import Step
from engine.scheduling.scheduler import Queues


class StaticScheduler(Queues):
    """Batches of up to `max_num_seqs` requests, all prompts in the first step."""

    def __init__(self, cache: KVCacheManager, max_num_seqs: int, **options) -> None:
        """`options`: as for `Queues`."""
        super().__init__(cache, **options)
        self.max_num_seqs = max_num_seqs

    def schedule(self) -> Step | None:
        """Packed prompts first, then one token each per step. None: nothing to do, or a running request has
        no room for its next token. The engine then fails the oldest, so that the others can go on.

        When nobody runs, a batch is filled from the queue until its places or the cache are full; until its
        last request has ended, nobody joins it. A step takes all that each running request lacks, after
        making room for it, drafts included; one that lacks nothing is left out.
        """
        if not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and self.admit_next():
                pass
        work = []
        for request in self.running:
            new = request.num_tokens_to_compute
            num_tokens = request.num_computed_tokens + new
            if not self.cache.reserve(request, num_tokens):
                return None
            if new:
                work.append((request, new))
        return self.take(work) if work else None
