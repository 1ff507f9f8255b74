"""Listeners: objects that the engine notifies of its events. Part 6.

Logs, metrics (Part 11) and cost (Part 19) are listeners. A listener must change none of the engine's objects;
it may only hang its own `account` on a request's `stats`. An exception of a listener is logged, and no
request fails from it. All methods are called on the thread that steps the engine, which waits for them.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVarTuple

from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step

logger = logging.getLogger(__name__)
Details = TypeVarTuple("Details")  # the types of what an event's method is called with


@dataclass(frozen=True)
class StepRecord:
    """What listeners learn of one step. `start` and `end` are seconds of the monotonic clock."""

    number: int
    start: float
    end: float
    schedule_seconds: float  # for the decision which requests run
    # From the end of scheduling until the result was read; the rest of the step is bookkeeping. With
    # async_scheduling this includes the wait for the step before.
    execute_seconds: float
    request_ids: tuple[str, ...]  # [S]
    tokens_computed: tuple[int, ...]  # [S]: new tokens of each request in this step
    # [S]: tokens of each prompt that the cache had when the request was admitted (Part 12)
    tokens_cached: tuple[int, ...]
    # [S]: the context of each request in this step, drafts included, whether they were accepted or not
    tokens_held: tuple[int, ...]
    num_running: int  # running requests after this step
    num_waiting: int  # waiting requests after this step
    error: str | None = None  # why the step failed; the tokens of a failed step do not count
    counters: dict[str, float] = field(default_factory=dict)  # `StepResult.counters`

    @classmethod
    def of(
        cls,
        step: Step,
        *,
        number: int,
        landed_at: float,
        end: float,
        num_running: int,
        num_waiting: int,
        error: str | None = None,
        counters: dict[str, float] | None = None,
    ) -> "StepRecord":
        """The record of a step whose result, or error, was read at `landed_at`, and that ended at `end`. Both
        are seconds of the monotonic clock.
        """
        batch = step.batch
        return cls(
            number=number,
            start=step.start,
            end=end,
            schedule_seconds=step.schedule_end - step.start,
            execute_seconds=landed_at - step.schedule_end,
            request_ids=batch.ids,
            tokens_computed=tuple([after - before for before, after in pairwise(batch.query_start)]),
            tokens_cached=tuple([request.num_cached_tokens for request in step.requests]),
            tokens_held=batch.context_lens,
            num_running=num_running,
            num_waiting=num_waiting,
            error=error,
            counters=counters or {},
        )


class Listener:
    """The base class of listeners. A subclass overrides the methods of the events that it needs."""

    def on_arrival(self, request: Request) -> None:
        """The engine has accepted and queued a request. Called for each of its n samples."""

    def on_schedule(self, batch: Batch) -> None:
        """A step is scheduled, and is not computed yet."""

    def on_preempt(self, request: Request) -> None:
        """A running request has lost its memory, and waits again."""

    def on_step(self, record: StepRecord) -> None:
        """A step has landed, or has failed."""

    def on_finish(self, request: Request) -> None:
        """A request has stopped, was aborted, or has failed. Called for each of its n samples."""

    def on_reject(self, request_id: str, error: Exception) -> None:
        """The engine has refused a request with `error`."""


class Listeners:
    """The engine's listeners. If one of them fails, the error is logged and the others are still notified."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        """Notify `listener` of all events from now on."""
        self._listeners.append(listener)

    def __bool__(self) -> bool:
        """Whether there is a listener."""
        return bool(self._listeners)

    def tell(self, event: Callable[[Listener, *Details], None], *details: *Details) -> None:
        """Call each listener's method of the same name as `event`, as in `tell(Listener.on_step, record)`. An
        exception is logged.
        """
        name = event.__name__
        for listener in self._listeners:
            try:
                getattr(listener, name)(*details)
            except Exception:
                logger.exception("listener %s failed in %s", type(listener).__name__, name)
