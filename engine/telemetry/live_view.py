"""The engine at work, as a snapshot: its memory, its requests, and its last steps. Part 12.

`LiveView` listens to one engine. It sends nothing: whoever wants a snapshot asks for one, in the engine's
thread between two steps. After a snapshot the view notes the steps of the next KEEP_SECONDS, for the snapshot
that may follow. While nobody asks, it notes only which requests are unfinished.

Every list in a snapshot has a bound, and the snapshot says how much there is in all. It has no text, and no
id that a client has chosen: requests are numbered in the order of their arrival. Knows no HTTP: the routes
are in engine/server/live_routes.py.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.paged import PagedCache
from engine.core.llm_engine import LLMEngine
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request, State
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.live_memory import MemoryCopy, copy_memory, copy_table

KEEP_SECONDS = 5.0  # after a snapshot: how long steps are noted
MAX_RUNNING, MAX_WAITING = 32, 16  # requests in a snapshot
MAX_STEPS = 64  # the newest ones
MAX_EVENTS = 8  # the newest ones


@dataclass(slots=True)
class Tracked:
    """A request that has not ended, and what it did in the last of its steps that the view has noted."""

    request: Request
    label: str  # its number, from 1, and behind a point which of n > 1 samples it is
    num_outputs: int = 0  # output tokens after that step
    step: int = 0  # the step's number
    computed: int = 0  # tokens that the step computed for this request, drafts included
    checked: int = 0  # drafts among these
    new: int = 0  # output tokens that the step brought


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment. Any thread may read it."""

    copy_seconds: float  # how long the copy took; no step could run meanwhile
    sizes: dict  # JSON data: time, model, seats, budget, and how many requests run and wait
    memory: MemoryCopy
    requests: list[dict]  # JSON data: at most MAX_RUNNING that run, then MAX_WAITING that wait
    steps: list[dict]  # JSON data, oldest first
    events: list[dict]  # JSON data, oldest first

    def read(self) -> dict:
        """The snapshot as JSON data."""
        return {
            **self.sizes,
            "memory": self.memory.read(),
            "requests": self.requests,
            "steps": self.steps,
            "events": self.events,
        }


class LiveView(Listener):
    """Makes snapshots of one engine. All methods must be called in the engine's thread."""

    def __init__(
        self, engine: LLMEngine, model_name: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Adds itself to the engine's listeners. `clock` returns seconds, and must be that of the engine's
        StepRecords.
        """
        self.engine, self.model_name = engine, model_name
        self._clock, self._start = clock, clock()
        self._tracked: dict[str, Tracked] = {}  # by Request.id
        self._num_arrived = 0  # users' requests; n samples count once
        self._notes_until = -math.inf  # by the clock: nothing later is noted
        self._steps: deque[dict] = deque(maxlen=MAX_STEPS)
        self._events: deque[dict] = deque(maxlen=MAX_EVENTS)
        engine.listeners.add(self)

    def snapshot(self) -> EngineSnapshot:
        """The engine as it is now, with the newest of the steps that were noted."""
        start = self._clock()
        if start > self._notes_until:  # what was noted is old, and steps were left out since
            self._steps.clear()
            self._events.clear()
            for tracked in self._tracked.values():
                tracked.num_outputs = len(tracked.request.stats.token_times)
        self._notes_until = start + KEEP_SECONDS
        scheduler = self.engine.scheduler
        running, waiting = scheduler.running, scheduler.waiting
        sizes = {
            "time": self._since_start(start),
            "model": self.model_name,
            "running": len(running),
            "waiting": len(waiting),
            "seats": scheduler.max_num_seqs if isinstance(scheduler, ContinuousScheduler) else None,
            "budget": self._budget(),
        }
        requests = []
        for request in running[:MAX_RUNNING] + waiting[:MAX_WAITING]:
            if request.id in self._tracked:  # otherwise it came before the view was made
                requests.append(self._row(self._tracked[request.id]))
        memory = copy_memory(scheduler.cache, running)
        steps, events = list(self._steps), list(self._events)
        return EngineSnapshot(self._clock() - start, sizes, memory, requests, steps, events)

    def _since_start(self, moment: float) -> float:
        """Seconds from the view's start to a moment of the clock."""
        return round(moment - self._start, 3)

    def _budget(self) -> int | None:
        """The most tokens that a step may have now; None if steps have no budget."""
        scheduler = self.engine.scheduler
        return scheduler.max_num_batched_tokens if isinstance(scheduler, ContinuousScheduler) else None

    def _row(self, tracked: Tracked) -> dict:
        """A request as JSON data. The last four entries are of its last step; `now` is `Tracked.computed`."""
        request, num_outputs = tracked.request, len(tracked.request.stats.token_times)
        table = copy_table(self.engine.scheduler.cache, request)
        return {
            "label": tracked.label,
            "state": self._state(request),
            "prompt": request.num_prompt_tokens,
            "output": num_outputs,
            "limit": request.output.limit,
            # A step in flight may have begun to compute the token whose id is not known yet (Part 13).
            "held": min(request.num_computed_tokens, request.num_prompt_tokens + num_outputs),
            "cached": request.num_cached_tokens,
            "drafts": len(request.draft_ids),
            "preemptions": request.num_preemptions,
            "adapter": request.adapter,
            "blocks": table.num_blocks,
            "given_back": table.num_given_back,
            "table": table.cells,
            "step": tracked.step,
            "now": tracked.computed,
            "checked": tracked.checked,
            "new": tracked.new,
        }

    def _state(self, request: Request) -> str:
        """One of "running" and "waiting", or for a request that waits once more: "preempted", if its keys and
        values are lost, or "swapped", if they are in the swap space.
        """
        if request.state is not State.WAITING or not request.num_preemptions:
            return request.state.value
        cache = self.engine.scheduler.cache
        return "swapped" if isinstance(cache, PagedCache) and request.id in cache.swap else "preempted"

    # What the engine tells its listeners.

    def on_arrival(self, request: Request) -> None:
        """Number the request. The samples of one user's request arrive together, the parent of all first."""
        if request.parent is None:
            self._num_arrived += 1
        label = str(self._num_arrived)
        if request.params.n > 1:
            label += "." + request.id.rpartition("/")[2]
        self._tracked[request.id] = Tracked(request, label)

    def on_finish(self, request: Request) -> None:
        """Forget the request."""
        self._tracked.pop(request.id, None)

    def on_schedule(self, batch: Batch) -> None:
        """Note the blocks that are copied before this step."""
        for copy in batch.copies:
            self._note_event(copy.kind, blocks=len(copy.source))

    def on_preempt(self, request: Request) -> None:
        """Note that the request has lost its memory."""
        tracked = self._tracked.get(request.id)
        if tracked is not None:
            self._note_event("preempt", label=tracked.label)

    def _note_event(self, kind: str, **details: object) -> None:
        """Note an event, if a snapshot was made in the last KEEP_SECONDS."""
        now = self._clock()
        if now <= self._notes_until:
            self._events.append({"time": self._since_start(now), "kind": kind, **details})

    def on_step(self, record: StepRecord) -> None:
        """Note a step that has landed or failed: its tokens by what they were for.

        `prompt`: of prompts. `again`: of requests that were preempted before, and do not decode yet.
        `output`: one for each request that decodes; beside them `kept` drafts stood and `refused` did not.
        """
        if record.end > self._notes_until:
            return
        tokens = dict.fromkeys(("prompt", "again", "output", "kept", "refused"), 0)
        for s, request_id in enumerate(record.request_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:  # it was aborted while the step was under way
                continue
            computed = record.tokens_computed[s]
            start = record.tokens_held[s] - computed  # the position of the first computed token
            has_decoded = _decodes(tracked, start)  # by `num_outputs` before this step
            num_outputs = len(tracked.request.stats.token_times)
            num_new = num_outputs - tracked.num_outputs
            tracked.num_outputs, tracked.step = num_outputs, record.number
            tracked.computed, tracked.new = computed, num_new
            tracked.checked = 0
            if has_decoded:
                tracked.checked = computed - 1  # all but the last known token are drafts
                kept = max(0, num_new - 1)  # each new token but the last is a draft that stood
                tokens["output"] += 1
                tokens["kept"] += kept
                tokens["refused"] += tracked.checked - kept
            elif tracked.request.num_preemptions:
                tokens["again"] += computed
            else:
                tokens["prompt"] += computed
        size_and_time = {
            "number": record.number,
            "seconds": round(record.end - record.start, 6),
            "budget": self._budget(),
            "failed": record.error is not None,
            "requests": len(record.request_ids),
        }
        self._steps.append(size_and_time | tokens)


def _decodes(tracked: Tracked, start: int) -> bool:
    """Whether a step that begins at position `start` decodes: begins at the last token that was known."""
    last_known = tracked.request.num_prompt_tokens + tracked.num_outputs - 1
    return tracked.num_outputs > 0 and start == last_known
