"""Static batching: a batch from the queue runs until its last request ends, then the next begins. Part 7.

The fixed cost of a step (its calls, the reading of the weights) is paid once for the whole batch. The places
of requests that end early are wasted: they stay empty until the longest request has finished. Part 8 fills
them.
"""

from engine.cache.manager import KVCacheManager
from engine.requests.step import Step
from engine.scheduling.scheduler import Queues


class StaticScheduler(Queues):
    """Runs batches of up to `max_num_seqs` requests. The first step of a batch computes all its prompts."""

    def __init__(self, cache: KVCacheManager, max_num_seqs: int, **options) -> None:
        """`options` are those of `Queues`."""
        super().__init__(cache, **options)
        self.max_num_seqs = max_num_seqs

    def schedule(self) -> Step | None:
        """The next step of the batch: all prompts in one step, then one token of each request in each step.

        If no request runs, a batch is filled from the queue until its places or the cache are full. Until the
        last request of the batch has ended, no request joins. A step computes all tokens that each running
        request lacks, drafts included, and reserves room first. A request that lacks none is left out.

        Returns None if there is nothing to do, or if the cache has no room for a running request's next
        token. In the second case the engine fails the oldest request, so that the others can go on.
        """
        if not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and self.admit_next():
                pass  # admit_next has moved one request to self.running
        work = []
        for request in self.running:
            num_new = request.num_tokens_to_compute
            num_tokens = request.num_computed_tokens + num_new
            if not self.cache.reserve(request, num_tokens):
                return None
            if num_new:
                work.append((request, num_new))
        return self.make_step(work) if work else None
