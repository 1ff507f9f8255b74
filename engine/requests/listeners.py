"""What happens in the engine, told to whoever listens: logs, metrics (Part 11), cost (Part 19). Part 6.

Listeners watch; they change nothing, and an exception in one never fails it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.requests.batch import Batch
from engine.requests.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """One step, for the record. Times are seconds of the monotonic clock."""

    number: int
    start: float
    end: float
    schedule_seconds: float  # deciding who runs
    execute_seconds: float  # forward pass and sampling; the rest of the step is bookkeeping
    request_ids: tuple[str, ...]  # [S]
    tokens_computed: tuple[int, ...]  # [S]: new tokens of each request in this step
    tokens_cached: tuple[int, ...]  # [S]: of its prompt, found in the cache at the start (Part 12)
    tokens_held: tuple[int, ...]  # [S]: tokens in the cache after this step
    num_running: int
    num_waiting: int
    error: str | None = None  # why the step failed: its work was for nothing
    counters: dict[str, float] = field(default_factory=dict)  # open: what an executor tells of it


class Listener:
    """Override what you want to hear."""

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
        """Whether anyone listens."""
        return bool(self._listeners)

    def tell(self, event: str, *details: object) -> None:
        """Call each listener's method of this name. What one raises is logged, and raised no further."""
        for listener in self._listeners:
            try:
                getattr(listener, event)(*details)
            except Exception:
                logger.exception("listener %s failed in %s", type(listener).__name__, event)
