"""Whether the engine is at work or hangs: a listener that remembers its last sign of life. Part 15.

A step that never comes back (a kernel that waits for ever, a driver that is gone) raises no error, and its
thread stays alive. It is noticed by the silence: no call of a listener while there is work.
"""

import time
from collections.abc import Callable

from engine.core.llm_engine import LLMEngine
from engine.requests.batch import Batch
from engine.requests.listeners import Listener, StepRecord
from engine.requests.request import Request

STUCK_SECONDS = 60  # of silence with work to do: the longest step there is (a first one compiles) is shorter


class StepWatch(Listener):
    """How long the engine has been silent while it had work. Adds itself to the engine's listeners: the
    engine's thread calls the `on_…` methods, and any thread may ask.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_sign = clock()  # when the engine last called a listener
        self._unfinished: set[str] = set()  # ids of requests
        engine.listeners.add(self)

    def silent_seconds(self) -> float:
        """Since the last sign of life; 0 when there is nothing to do."""
        return self._clock() - self._last_sign if self._unfinished else 0.0

    def is_stuck(self) -> bool:
        """True from STUCK_SECONDS of silence on, until the step comes back."""
        return self.silent_seconds() >= STUCK_SECONDS

    def on_arrival(self, request: Request) -> None:
        """A sign of life, too: the engine's thread takes requests between two steps only."""
        self._note_sign()  # first: the last request may have ended long ago
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
