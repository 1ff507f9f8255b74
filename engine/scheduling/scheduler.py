"""The interface of schedulers, and the queues that all schedulers share. Part 6.

A scheduler chooses the requests of the next step. It owns the queues, and asks the cache for memory. It does
not know the model, text, or why requests finish.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from engine.cache.manager import KVCacheManager
from engine.requests.listeners import Listeners
from engine.requests.request import Request, State
from engine.requests.step import Step
from engine.scheduling.batching import Scheduled, SelectRows, make_batch, sampled_rows


class Scheduler(Protocol):
    """Chooses the requests of each step. One thread makes all calls, in this order for each step: `schedule`,
    then `update` if the step succeeded or `rollback` if it failed, then `finish` for requests that ended. In
    between, the next step may be scheduled (Part 13). `Queues` documents the methods.
    """

    cache: KVCacheManager
    listeners: Listeners  # the engine's, once the scheduler belongs to an engine
    waiting: list[Request]  # best rank first
    running: list[Request]

    def add(self, request: Request) -> None: ...
    def schedule(self) -> Step | None: ...
    def update(self, step: Step, drafts: list[list[int]] | None = None) -> None: ...
    def rollback(self, step: Step) -> None: ...
    def finish(self, request: Request) -> None: ...
    def lend(self, request: Request, num_tokens: int) -> bool: ...
    def take_back(self, request: Request, num_tokens: int) -> None: ...


class AdapterSlots(Protocol):
    """The model's slots for adapters (Part 18), as in `engine/lora/slots.py`."""

    slot_of: Mapping[str, int]  # by an adapter's key; contains the adapters of all running requests

    def assign(self, key: str, running: Sequence[Request]) -> bool:
        """Give the adapter a slot, if it has none. Returns False if the adapters of the running requests take
        all slots.
        """


by_rank = attrgetter("rank")
RUNNING = State.RUNNING  # a global, since each lookup of an Enum's member takes as long as a call


class Queues:
    """The waiting and the running requests, and the bookkeeping around a step. Schedulers add `schedule`."""

    def __init__(
        self,
        cache: KVCacheManager,
        adapter_slots: AdapterSlots | None = None,
        select_rows: SelectRows = sampled_rows,
    ) -> None:
        """`adapter_slots` gives slots to the adapters of running requests; None if no request has an adapter.
        `select_rows` is that of `make_batch`.
        """
        self.cache, self.listeners = cache, Listeners()
        self._adapter_slots, self._select_rows = adapter_slots, select_rows
        self.waiting: list[Request] = []  # best rank first
        self.running: list[Request] = []  # in order of admission, unless the scheduler sorts them
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request: first come, first served."""
        self._arrivals += 1
        request.rank = (0.0, self._arrivals)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """Put a request into the queue, at the place of its rank."""
        request.state = State.WAITING
        insort(self.waiting, request, key=by_rank)

    def admit_next(self) -> Request | None:
        """Move the first waiting request to the running requests, and return it. At least one must wait.

        Requests whose adapters have no slot are passed over (`_next_with_slot`). Returns None if all waiting
        requests wait for a slot, or if the cache cannot admit the request now.
        """
        request = self._next_with_slot()
        if request is None:
            return None
        num_cached = self.cache.admit(request)
        if num_cached is None:
            return None
        request.num_computed_tokens = num_cached
        if not request.num_preemptions:  # once preempted, it may find tokens that it has computed itself
            request.num_cached_tokens = num_cached
        request.state = State.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        return request

    def _next_with_slot(self) -> Request | None:
        """The first waiting request that has no adapter, or whose adapter has a slot; None if all wait for a
        slot. An adapter without a slot is given one here, if one can be had (`AdapterSlots.assign`).

        As in vLLM, a request may overtake a request that waits for a slot. But a request with an adapter of
        the running requests keeps that adapter's slot in use for longer. So it overtakes only if its rank is
        less than 1 behind. Where ranks get worse with time, no request waits for ever.
        """
        if self._adapter_slots is None:
            return self.waiting[0]
        first_without_slot: Request | None = None
        for request in self.waiting:
            if request.adapter is None:
                return request
            if first_without_slot is None:
                if self._adapter_slots.assign(request.adapter, self.running):
                    return request
                first_without_slot = request
            else:
                may_overtake = request.rank[0] < first_without_slot.rank[0] + 1  # by priority and time alone
                if may_overtake and request.adapter in self._adapter_slots.slot_of:
                    return request
        return None

    def make_step(self, work: Scheduled) -> Step:
        """Make the step of `work`. The new tokens count as computed from now on, until a `rollback`."""
        adapter_slots = self._adapter_slots.slot_of if self._adapter_slots else None
        batch = make_batch(work, self.cache, adapter_slots, self._select_rows)
        for request, n in work:
            request.num_computed_tokens += n
        return Step(batch, tuple([request for request, _ in work]))

    def update(self, step: Step, drafts: list[list[int]] | None = None) -> None:
        """Commit the tokens of a step that has succeeded in the cache, and set each request's `draft_ids` to
        its entry of drafts[S]; to [] if `drafts` is None.

        Called after the step's tokens are appended. Rejected drafts no longer count as computed. Requests of
        the step that do not run any more are left as they are.
        """
        context_lens = step.batch.context_lens
        for s, request in enumerate(step.requests):
            if request.state is not RUNNING:
                continue
            if drafts is not None or request.draft_ids:
                # Rejected drafts are not in `token_ids`, and the last known token is not computed yet.
                request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
                request.draft_ids = drafts[s] if drafts else []
            # Not the last known token, whose keys and values are not computed yet.
            num_known = len(request.token_ids) - request.num_output_placeholders
            self.cache.commit(request, min(context_lens[s], num_known - 1))

    def rollback(self, step: Step) -> None:
        """Undo `make_step` for a step that has failed: its tokens do not count as computed any more, and the
        placeholders of the tokens that it did not choose are removed. The next step repeats the failed step's
        copies, since the failed step may not have made them.
        """
        batch = step.batch
        self.cache.replan(batch.copies)
        for s, request in enumerate(step.requests):
            request.num_computed_tokens = batch.context_lens[s] - batch.num_new_tokens(s)
            request.drop_placeholders()

    def finish(self, request: Request) -> None:
        """Forget a request, waiting or running, and free its memory. Does nothing for a finished one."""
        if request.state is State.FINISHED:
            return
        if request.state is State.WAITING:
            del self.waiting[bisect_left(self.waiting, request.rank, key=by_rank)]  # ranks are unique
        else:
            self.running.remove(request)
        request.state = State.FINISHED
        self.cache.release(request)

    def lend(self, request: Request, num_tokens: int) -> bool:
        """Reserve memory for a running request's first `num_tokens` tokens, drafts included (Part 16).
        Returns False if there is no room now: no request is preempted for drafts.
        """
        return self.cache.reserve(request, num_tokens)

    def take_back(self, request: Request, num_tokens: int) -> None:
        """Free the memory that a running request has reserved beyond its first `num_tokens` tokens."""
        self.cache.trim(request, num_tokens)


def fail_all(step: Step, error: Exception) -> list[Request]:
    """Fail all requests of the step. This is the default of LLMEngine's `recover`."""
    return list(step.requests)
