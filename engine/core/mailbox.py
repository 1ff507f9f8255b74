"""How outputs get from the engine's thread to the event loops in which they are read. Part 6.

Promises that the thread never waits for a reader; that an output is replaced only by one that contains it;
and that a step wakes a loop once, however many requests are read there. Knows no engine: functions that begin
and abort a request are handed in.
"""

import asyncio
import threading
from collections.abc import Callable

from engine.decoding.outputs import RequestOutput


class EngineError(RuntimeError):
    """The request failed in the engine, through no fault of its own; the message says why."""


def error_text(error: BaseException) -> str:
    """The error as users see it: its type and its message."""
    return f"{type(error).__name__}: {error}"


class Post:
    """Sends outputs from the engine's thread into one event loop: one call wakes the loop for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._lock = loop, threading.Lock()
        self._news: dict[Mailbox, RequestOutput | Exception] = {}

    def send(self, news: "dict[Mailbox, RequestOutput | Exception]") -> None:
        """Have the loop put these outputs into their mailboxes. Raises RuntimeError: the loop has closed."""
        with self._lock:
            is_first = not self._news  # else the loop is awake already, and takes these, too
            self._news |= news
        if is_first or self.loop.is_closed():
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
        """Store an output, in place of one that was not read yet: the new one contains it."""
        self.unread = output
        if self._filled and not self._filled.done():
            self._filled.set_result(None)

    def filled(self) -> asyncio.Future:
        """A future that is done when an output comes; to be awaited while `unread` is None."""
        self._filled = self.post.loop.create_future()
        return self._filled


class Reader:
    """An asynchronous iterator over one request's outputs, each with everything so far; the last is finished.

    The first output that is asked for begins the request. Whoever leaves early (`aclose`, cancelled, or the
    iterator is dropped) aborts it.
    """

    def __init__(
        self, mailbox: Mailbox, begin: Callable[[], None], abort: Callable[[], None], tokens: int
    ) -> None:
        """`tokens`: of all samples of the request at most, prompts included (Part 15 counts them)."""
        self._mailbox, self._begin, self._abort, self.tokens = mailbox, begin, abort, tokens
        self._begun = self._ended = False

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> RequestOutput:
        """The latest output, once there is one that was not read. Raises EngineError: the request failed; or
        the exception that was put in the output's place.
        """
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
