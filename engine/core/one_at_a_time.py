"""Does long work in one thread, a piece at a time, for the event loops that wait for it. Part 6.

The module promises that a bounded number of pieces waits; that work which several callers ask for at once is
done once, for all of them; and that work whose callers have all left before its turn is not done.
"""

import asyncio
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.decoding.params import NoRoomError
from engine.requests.work import SlowWork


@dataclass
class _Call:
    """A piece of work that is under way or waits, and how many callers wait for its result."""

    future: Future
    num_callers: int = 0


class OneAtATime:
    """A thread that does work in the order in which it comes. Event loops of several threads may call it."""

    def __init__(self, noun: str, max_waiting: float) -> None:
        """At most `max_waiting` pieces of work wait, beside the one that is under way; math.inf for any
        number. `noun` names the pieces in an error message and in the thread's name: "constraints".
        """
        self.noun, self.max_waiting = noun, max_waiting
        self._calls: dict[Hashable, _Call] = {}
        self._lock = threading.RLock()  # guards `_calls`; a future that is cancelled calls `_forget` at once
        self._thread = ThreadPoolExecutor(1, noun)

    @property
    def num_calls(self) -> int:
        """The number of pieces of work that are under way or wait."""
        return len(self._calls)

    async def call(self, work: SlowWork) -> Any:
        """Have the work done, or join callers of work with the same name, and wait for it. Returns and raises
        what its function returns and raises. Raises NoRoomError if `max_waiting` other pieces wait.
        """
        with self._lock:
            call = self._calls.get(work.name)
            if call is None:
                if len(self._calls) > self.max_waiting:
                    raise NoRoomError(f"{self.max_waiting} {self.noun} wait for their turn already")
                call = self._calls[work.name] = _Call(self._thread.submit(work.function))
                call.future.add_done_callback(lambda _: self._forget(work.name, call))
            call.num_callers += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(call.future))
        finally:
            with self._lock:
                call.num_callers -= 1
                if not call.num_callers:
                    call.future.cancel()  # which does nothing once the work has begun

    def _forget(self, name: Hashable, call: _Call) -> None:
        """Forget work that is done or cancelled, unless another call of its name has taken its place."""
        with self._lock:
            if self._calls.get(name) is call:
                del self._calls[name]
