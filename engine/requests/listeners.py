"""Listeners: objects that the engine tells of its events: logs, metrics (Part 11), cost (Part 19). Part 6.

They change nothing in the engine, and an exception in one is logged and fails nothing.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.requests.batch import Batch
from engine.requests.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What listeners are told of one step. Times are seconds of the monotonic clock."""

    number: int
    start: float
    end: float
    schedule_seconds: float  # to decide which requests run
    execute_seconds: float  # forward pass and sampling; the rest of the step is bookkeeping
    request_ids: tuple[str, ...]  # [S]
    tokens_computed: tuple[int, ...]  # [S]: new tokens of each request in this step
    tokens_cached: tuple[
        int, ...
    ]  # [S]: of each prompt, what the cache had when the request came in (Part 12)
    tokens_held: tuple[int, ...]  # [S]: tokens in the cache after this step
    num_running: int  # requests, after this step
    num_waiting: int
    error: str | None = None  # why the step failed, if it did: then none of its tokens counts
    counters: dict[str, float] = field(default_factory=dict)  # by name: of `StepResult.counters`


class Listener:
    """Does nothing; a subclass overrides the methods of the events it wants to be told of."""

    def on_arrival(self, request: Request) -> None: ...
    def on_schedule(self, batch: Batch) -> None: ...
    def on_preempt(self, request: Request) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def on_finish(self, request: Request) -> None: ...
    def on_reject(self, request_id: str, error: Exception) -> None: ...


class Listeners:
    """Tells all listeners; a failing one is logged and the others are told."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def __bool__(self) -> bool:
        """Whether there is a listener."""
        return bool(self._listeners)

    def tell(self, event: str, *details: object) -> None:
        """Call the method named `event` of each listener, with `details`. An exception is logged."""
        for listener in self._listeners:
            try:
                getattr(listener, event)(*details)
            except Exception:
                logger.exception("listener %s failed in %s", type(listener).__name__, event)
