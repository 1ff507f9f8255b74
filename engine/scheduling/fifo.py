"""First in, first out, one request at a time. Part 6."""

from engine.requests.step import Step
from engine.scheduling.scheduler import Queues


class FIFOScheduler(Queues):
    """Runs the oldest request to its end before it looks at the next."""

    def schedule(self) -> Step | None:
        """The whole prompt in one step, then one token (and the drafts behind it) in each. Room in the cache
        is reserved first. None: nothing has changed, since no request runs or can be admitted, the running
        one has nothing to compute, or the cache has no room for it.
        """
        if not self.running and self.waiting:
            self.admit_next()
        if not self.running:
            return None
        request = self.running[0]
        new = request.num_tokens_to_compute
        if not new or not self.cache.reserve(request, request.num_computed_tokens + new):
            return None  # alone in the cache, and checked to fit: its last token is on its way
        return self.take([(request, new)])
