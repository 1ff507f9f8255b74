"""First in, first out: one request runs at a time, the oldest first. Part 6."""

from engine.requests.step import Step
from engine.scheduling.scheduler import Queues


class FIFOScheduler(Queues):
    """Runs the oldest request to its end before it admits the next."""

    def schedule(self) -> Step | None:
        """The next step of the oldest request: the whole prompt in the first step, then one token, and the
        drafts behind it, in each. Room in the cache is reserved first.

        Returns None if no request runs or can be admitted, if the running request has nothing to compute, or
        if the cache has no room for its tokens. No further token counts as computed then.
        """
        if not self.running and self.waiting:
            self.admit_next()
        if not self.running:
            return None
        request = self.running[0]
        num_new = request.num_tokens_to_compute
        if not num_new or not self.cache.reserve(request, request.num_computed_tokens + num_new):
            return None  # the request's last token has not landed (a request alone in the cache has room)
        return self.make_step([(request, num_new)])
