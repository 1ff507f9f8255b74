"""Continuous batching: every step is filled anew, so a request joins while others are in full flow. Part 8.

One budget of tokens per step, and no phases: a prompt and a growing output are both tokens still to compute.
Promises that the budget and the number of sequences are never exceeded, that a preempted request's output is
the same as if it had not been, and that no request waits for ever behind newcomers.
Sources: iteration-level scheduling: Yu et al., Orca, OSDI 2022; chunked prefill: Agrawal et al.,
Sarathi-Serve, OSDI 2024, https://arxiv.org/abs/2403.02310; the single budget: vLLM's V1 scheduler.
"""

from engine.cache.manager import KVCacheManager
from engine.requests.request import Request, State
from engine.requests.step import Step
from engine.scheduling.scheduler import Queues, by_rank

# A request that has waited this many steps goes before newcomers of one level better.
STEPS_PER_PRIORITY = 256


class ContinuousScheduler(Queues):
    """At most `max_num_seqs` running requests and `max_num_batched_tokens` tokens in a step."""

    def __init__(
        self,
        cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        **options,
    ) -> None:
        """`options`: as for `Queues`. Raises ValueError: no seat, or fewer tokens in a step than running
        requests, each of which gets one.
        """
        super().__init__(cache, **options)
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(f"1 <= {max_num_seqs=} <= {max_num_batched_tokens=} does not hold")
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._step = 0

    def add(self, request: Request) -> None:
        """Queue by priority, then arrival.

        The rank never changes, yet no request starves: a later arrival starts with a worse number, so it
        overtakes by priority only those that came less than STEPS_PER_PRIORITY steps before it.
        """
        self._arrivals += 1
        request.rank = (request.priority + self._step / STEPS_PER_PRIORITY, self._arrivals)
        self._enqueue(request)

    def schedule(self) -> Step | None:
        """Who runs in the next step, and how many tokens of each. None: nothing to do.

        Each call counts as a step in `self._step`, by which ranks age. All share one budget of tokens:

        - Running requests first, best rank first, each as much as it lacks and the budget allows; but one
          token of the budget is left for every running request behind it. One with nothing to compute
          (its last token is still on its way) is left out.
        - Before a request has its tokens, `cache.reserve` makes room for them, drafts included. While the
          answer is no, the running request of the worst rank is preempted; that may be the request itself.
        - Then newcomers, in the order of the queue, while there are budget, seats and memory. A prompt may
          come in chunks, but needs room for all that is known of it before the first: else it is put back,
          and nobody behind it is admitted. A step that preempts admits nobody.
        """
        self._step += 1
        budget = self.max_num_batched_tokens
        work: list[tuple[Request, int]] = []
        request: Request | None
        # 1. Running requests first, best rank first: their outputs are awaited, and their memory is in use.
        self.running.sort(key=by_rank)
        preempted = False
        queue = list(self.running)
        running = State.RUNNING  # looked up once: an Enum's member takes as long to look up as a call
        for i, request in enumerate(queue):
            if request.state is not running:  # preempted a moment ago
                continue
            num_behind = len(queue) - i - 1  # each of them is left a token: a long prompt holds nobody up
            new = min(request.num_tokens_to_compute, budget - num_behind)
            if not new:  # its last token is still on its way
                continue
            while not self.cache.reserve(request, request.num_computed_tokens + new):
                victim = self.running[-1]  # the worst rank: none of those already in `work`
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                work.append((request, new))
                budget -= new
        # 2. Then newcomers, in order, as far as budget and memory go. A long prompt comes in chunks, yet with
        # room for all that is known of it: else two newcomers could keep pushing each other out.
        while self.waiting and budget and len(self.running) < self.max_num_seqs and not preempted:
            request = self.admit_next()
            if request is None:
                break
            if not self.cache.reserve(request, request.num_computed_tokens + request.num_tokens_to_compute):
                self._put_back(request)
                break
            new = min(request.num_tokens_to_compute, budget)
            work.append((request, new))
            budget -= new
        return self.take(work) if work else None

    def _preempt(self, request: Request) -> None:
        """Take a running request's memory for a better one; its tokens will be computed again."""
        self._put_back(request)
        request.num_preemptions += 1
        self.listeners.tell("on_preempt", request)

    def _put_back(self, request: Request) -> None:
        """From the running requests to its old place in the queue, with nothing computed and no memory.

        Rank and output stay. Drafts and the prompt's log probabilities are forgotten,
        since both will be computed again.
        """
        self.running.remove(request)
        self.cache.preempt(request)
        request.num_computed_tokens = 0
        request.draft_ids, request.prompt_logprobs = [], []
        self._enqueue(request)
