"""Detects an engine that hangs: a listener that records when the engine last called a listener. Part 15.

A step may never return, because a kernel waits forever or because a driver is gone. Such a step raises no
error, and the engine's thread stays alive. The only sign is that the engine has work and calls no listener.
"""

import time
from collections.abc import Callable

from engine.core.llm_engine import LLMEngine
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request

STUCK_SECONDS = 60  # of silence with work to do; even a first step, which compiles, is shorter


class StepWatch(Listener):
    """Measures for how long the engine has had work and has called no listener.

    `StepWatch(engine)` adds itself to the engine's listeners. The engine's thread calls the `on_…` methods;
    any thread may call `silent_seconds` and `is_stuck`. `clock` returns seconds.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_sign = clock()  # when the engine last called a listener
        self._unfinished: set[str] = set()  # ids of the unfinished requests
        engine.listeners.add(self)

    def silent_seconds(self) -> float:
        """Seconds since the engine last called a listener; 0 if the engine has no work."""
        return self._clock() - self._last_sign if self._unfinished else 0.0

    def is_stuck(self) -> bool:
        """Whether the engine has been silent for STUCK_SECONDS or more."""
        return self.silent_seconds() >= STUCK_SECONDS

    def on_arrival(self, request: Request) -> None:
        """An arrival is also a sign of life: the engine's thread takes requests only between two steps."""
        self._note_sign()  # before the add: else the idle time since the last request would count as silence
        self._unfinished.add(request.id)

    def on_schedule(self, batch: Batch) -> None:
        self._note_sign()

    def on_step(self, record: StepRecord) -> None:
        self._note_sign()

    def on_finish(self, request: Request) -> None:
        self._note_sign()
        self._unfinished.discard(request.id)

    def _note_sign(self) -> None:
        self._last_sign = self._clock()
