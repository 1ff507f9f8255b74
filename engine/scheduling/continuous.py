"""Continuous batching: every step is filled anew, so a request can join while others decode. Part 8.

Each step has one budget of tokens, and there is no prefill or decode phase: the tokens of a prompt and of a
growing output are both tokens still to compute. The scheduler promises that no step exceeds the budget or the
number of sequences, that a preempted request has the same output as without the preemption, and that no
request waits for ever behind newcomers.
Sources: iteration-level scheduling: Yu et al., Orca, OSDI 2022; chunked prefill: Agrawal et al.,
Sarathi-Serve, OSDI 2024, https://arxiv.org/abs/2403.02310; the single budget: vLLM's V1 scheduler.
"""

from engine.cache.manager import KVCacheManager
from engine.requests.listeners import Listener
from engine.requests.request import Request
from engine.requests.step import Step
from engine.scheduling.scheduler import RUNNING, Queues, by_rank

# A request that has waited this many steps goes before newcomers whose priority is better by one.
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
        """`options` are those of `Queues`. Raises ValueError unless 1 <= max_num_seqs <=
        max_num_batched_tokens: each running request gets a token in each step.
        """
        super().__init__(cache, **options)
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(f"1 <= {max_num_seqs=} <= {max_num_batched_tokens=} does not hold")
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._step = 0

    def add(self, request: Request) -> None:
        """Queue a request by priority, then by arrival. A lower priority goes first.

        A request's rank never changes, yet no request starves: later arrivals start with worse ranks. A
        request whose priority is better by d overtakes only requests that came less than
        d · STEPS_PER_PRIORITY steps earlier. Of equal priority, a request with an adapter overtakes one that
        waits for an adapter's slot (`_next_with_slot`) only if the waiting one came less than
        STEPS_PER_PRIORITY steps earlier.
        """
        self._arrivals += 1
        request.rank = (request.priority + self._step / STEPS_PER_PRIORITY, self._arrivals)
        self._enqueue(request)

    def schedule(self) -> Step | None:
        """Choose the requests of the next step, and how many tokens of each to compute. Returns None if there
        is nothing to compute.

        Each call adds 1 to `self._step`, by which ranks age. All requests share one budget of tokens:

        - Running requests come first, best rank first. Each gets the tokens that it lacks, as far as the
          budget allows, but one token of the budget is left for every running request behind it. A request
          with nothing to compute (its last token has not landed) is left out.
        - Before a request gets tokens, `cache.reserve` makes room for them, drafts included. While the cache
          refuses, the running request of the worst rank is preempted, which may be the request itself.
        - Newcomers come next, in the order of the queue, while there are budget, seats and memory. A prompt
          may come in chunks, but the cache must have room for all its known tokens before the first chunk. If
          not, the request is put back, and no request behind it is admitted. A step that preempts a request
          admits none.
        """
        self._step += 1
        budget = self.max_num_batched_tokens
        work: list[tuple[Request, int]] = []
        # 1. Running requests first, best rank first: users await their outputs, and their memory is in use.
        self.running.sort(key=by_rank)
        preempted = False
        queue = list(self.running)
        for i, request in enumerate(queue):
            if request.state is not RUNNING:  # preempted in this loop
                continue
            num_behind = len(queue) - i - 1  # one token is left for each: a long prompt delays none of them
            num_new = min(request.num_tokens_to_compute, budget - num_behind)
            if not num_new:  # the request's last token has not landed
                continue
            while not self.cache.reserve(request, request.num_computed_tokens + num_new):
                victim = self.running[-1]  # the worst rank, and never a request that is in `work`
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:  # the loop ended without a break: the cache has room
                work.append((request, num_new))
                budget -= num_new
        # 2. Then newcomers, in order, as far as budget and memory go. A long prompt comes in chunks, but has
        #    room for all its known tokens first: otherwise two newcomers could preempt each other for ever.
        while self.waiting and budget and len(self.running) < self.max_num_seqs and not preempted:
            newcomer = self.admit_next()
            if newcomer is None:
                break
            num_known = newcomer.num_computed_tokens + newcomer.num_tokens_to_compute
            if not self.cache.reserve(newcomer, num_known):
                self._put_back(newcomer)
                break
            num_new = min(newcomer.num_tokens_to_compute, budget)
            work.append((newcomer, num_new))
            budget -= num_new
        return self.make_step(work) if work else None

    def _preempt(self, request: Request) -> None:
        """Free a running request's memory for a request of better rank. Its tokens will be computed again."""
        self._put_back(request)
        request.num_preemptions += 1
        self.listeners.tell(Listener.on_preempt, request)

    def _put_back(self, request: Request) -> None:
        """Move a running request to its old place in the queue, with no token computed and no memory.

        The request keeps its rank and its output. It forgets its drafts and its prompt's log probabilities,
        since both will be computed again.
        """
        self.running.remove(request)
        self.cache.preempt(request)
        request.num_computed_tokens = 0
        request.draft_ids, request.prompt_logprobs = [], []
        self._enqueue(request)
