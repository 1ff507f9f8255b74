"""Who runs in the next step: what every scheduler shares, and the promise they keep. Part 6.

A scheduler owns the queue and asks the cache for memory. It does not know the model, text, or why requests
finish.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from engine.cache.manager import KVCacheManager
from engine.requests.listeners import Listeners
from engine.requests.request import Request, State
from engine.requests.step import Step
from engine.scheduling.batching import SelectRows, Work, make_batch, sampled_rows


class Scheduler(Protocol):
    """Called by one thread, again and again: schedule, (the step runs), update or rollback, finish."""

    cache: KVCacheManager
    listeners: Listeners  # the engine's own, once it has one
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
    """The slots of a model that hold adapters (Part 18): `engine/lora/slots.py` has them."""

    slot_of: Mapping[str, int]  # by an adapter's key; all those of running requests are there

    def assign(self, key: str, running: Sequence[Request]) -> bool:
        """Whether this adapter has a slot now, beside those of the running requests."""


by_rank = attrgetter("rank")
RUNNING = State.RUNNING  # looked up once: an Enum's member takes as long to look up as a call


class Queues:
    """A waiting queue in order of rank, the running requests, and the bookkeeping around a step."""

    def __init__(
        self,
        cache: KVCacheManager,
        adapter_slots: AdapterSlots | None = None,
        select_rows: SelectRows = sampled_rows,
    ) -> None:
        """`adapter_slots`: gives the adapters of running requests their slots; None: no request has an
        adapter. `select_rows`: as for `make_batch`.
        """
        self.cache, self.listeners = cache, Listeners()
        self._adapter_slots, self._select_rows = adapter_slots, select_rows
        self.waiting: list[Request] = []  # best rank first
        self.running: list[Request] = []  # in order of admission
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request: first come, first served."""
        self._arrivals += 1
        request.rank = (0.0, self._arrivals)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=by_rank)

    def admit_next(self) -> Request | None:
        """Move the first waiting request (there must be one) to the running ones; None: the cache has no room
        for it now. A request whose adapter has no slot waits on, and others go first: `_first_with_slot`.
        """
        request = self._first_with_slot()
        cached = None if request is None else self.cache.admit(request)
        if request is None or cached is None:
            return None
        request.num_computed_tokens = cached
        if not request.num_preemptions:  # after a preemption, the cache may have what it computed itself
            request.num_cached_tokens = cached
        request.state = State.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        return request

    def _first_with_slot(self) -> Request | None:
        """The first waiting request whose adapter has a slot, or that has no adapter; None: all wait for one.

        As in vLLM, requests behind one that waits for a slot may go first. But one with an adapter of the
        running requests keeps that adapter's slot in use: it goes first only if its rank is less than 1
        behind; in continuous batching, if it came less than STEPS_PER_PRIORITY steps later. So no request
        waits for ever.
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
                continue
            may_overtake = request.rank[0] < first_without_slot.rank[0] + 1
            if may_overtake and request.adapter in self._adapter_slots.slot_of:
                return request
        return None

    def take(self, work: Work) -> Step:
        """Make the step of these (request, new tokens), which count as computed from here on. If the step
        fails, `rollback` undoes this.
        """
        adapter_slots = self._adapter_slots.slot_of if self._adapter_slots else None
        batch = make_batch(work, self.cache, adapter_slots, self._select_rows)
        for request, n in work:
            request.num_computed_tokens += n
        return Step(batch, tuple(request for request, _ in work))

    def update(self, step: Step, drafts: list[list[int]] | None = None) -> None:
        """Called when a step has succeeded and its tokens are appended: commit them in the cache, and set
        `draft_ids` to drafts[S]. Rejected drafts do not count as computed. Requests of the step that run no
        longer are left as they are.
        """
        for s, request in enumerate(step.requests):
            if request.state is not RUNNING:
                continue
            if drafts is not None or request.draft_ids:
                request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
                request.draft_ids = drafts[s] if drafts else []
            # The last known token was chosen by this step: its keys and values are not computed yet.
            num_known = len(request.token_ids) - request.num_output_placeholders
            self.cache.commit(request, min(step.batch.context_lens[s], num_known - 1))

    def rollback(self, step: Step) -> None:
        """Called when a step has failed: its tokens do not count as computed, and the placeholders of the
        tokens that it should have chosen are removed. The next step has its copies again, since it may not
        have made them.
        """
        batch = step.batch
        self.cache.replan(batch.copies)
        for s, request in enumerate(step.requests):
            request.num_computed_tokens = batch.context_lens[s] - batch.num_new_tokens(s)
            request.drop_placeholders()

    def finish(self, request: Request) -> None:
        """Forget a request, waiting or running, and free its memory."""
        if request.state is State.FINISHED:
            return
        if request.state is State.WAITING:
            del self.waiting[bisect_left(self.waiting, request.rank, key=by_rank)]  # ranks are unique
        else:
            self.running.remove(request)
        request.state = State.FINISHED
        self.cache.release(request)

    def lend(self, request: Request, num_tokens: int) -> bool:
        """Reserve memory for a running request's first `num_tokens` tokens, drafts included, if there is some
        now (Part 16). No request is preempted for drafts.
        """
        return self.cache.reserve(request, num_tokens)

    def take_back(self, request: Request, num_tokens: int) -> None:
        """Free what was lent to a running request beyond `num_tokens` tokens."""
        self.cache.trim(request, num_tokens)


def fail_all(step: Step, error: Exception) -> list[Request]:
    """All requests of the step: the default of LLMEngine's `recover`."""
    return list(step.requests)
