"""Outputs on their way from the engine's thread to whoever reads them, in an event loop each. Part 6.

Promises that the thread never waits for a reader; that an output is replaced only by one that contains it;
and that a step wakes a loop once, however many read there. Knows no engine: how a request is begun and
aborted is handed in.
"""

import asyncio
import threading
from collections.abc import Callable

from engine.decoding.outputs import RequestOutput


class EngineError(RuntimeError):
    """The request failed in the engine, through no fault of its own; the message says why."""


class Post:
    """The way from the engine's thread into one event loop: however much there is, one call wakes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._lock = loop, threading.Lock()
        self._news: dict[Mailbox, RequestOutput | Exception] = {}

    def send(self, news: "dict[Mailbox, RequestOutput | Exception]") -> None:
        """Raises RuntimeError when the loop has closed."""
        with self._lock:
            asleep = not self._news
            self._news |= news
        if asleep or self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        for mailbox, output in news.items():
            mailbox.put(output)


class Mailbox:
    """One request's latest output, in its reader's event loop."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.unread: RequestOutput | Exception | None = None
        self._filled: asyncio.Future | None = None  # what the reader waits for

    def put(self, output: RequestOutput | Exception) -> None:
        """An output that was not read yet is replaced: the new one contains it."""
        self.unread = output
        if self._filled and not self._filled.done():
            self._filled.set_result(None)

    def filled(self) -> asyncio.Future:
        """To be awaited while nothing is unread."""
        self._filled = self.post.loop.create_future()
        return self._filled


class Reader:
    """One request's outputs, each with everything so far; the last one is finished.

    Iterating begins the request. Leaving early (`aclose`, cancelled, or dropped) aborts it.
    """

    def __init__(
        self, mailbox: Mailbox, begin: Callable[[], None], abort: Callable[[], None], tokens: int
    ) -> None:
        """`tokens`: what its samples may come to, prompts included."""
        self._mailbox, self._begin, self._abort, self.tokens = mailbox, begin, abort, tokens
        self._begun = self._ended = False

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> RequestOutput:
        """The latest output, once there is one that was not read. Raises what was put in its place."""
        if self._ended:
            raise StopAsyncIteration
        if not self._begun:
            self._begin()
            self._begun = True
        mailbox = self._mailbox
        try:
            while mailbox.unread is None:
                await mailbox.filled()
            output, mailbox.unread = mailbox.unread, None
            if isinstance(output, Exception):
                raise output
            if output.error:
                raise EngineError(output.error)
        except BaseException:
            self._leave()
            raise
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._begun and not self._ended:
            self._abort()
        self._ended = True
