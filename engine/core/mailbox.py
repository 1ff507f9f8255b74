"""Brings outputs from the engine's thread to the event loops in which they are read. Part 6.

The module promises that the engine's thread never waits for a reader, that an unread output is replaced only
by a later output of the same request, which contains it, or by an error, and that a step wakes each event
loop at most once, however many requests are read there. The module does not know the engine: a `Reader` is
given the functions that begin and abort its request.
"""

import asyncio
import threading
from collections.abc import Callable

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError


class EngineError(RuntimeError):
    """The engine failed a request that was valid. The message says why."""


class Post:
    """Sends outputs from the engine's thread to one event loop. One wake-up delivers all that were sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._lock = loop, threading.Lock()
        self._unsent: dict[Mailbox, RequestOutput | Exception] = {}  # what the loop has not delivered yet

    def send(self, outputs: "dict[Mailbox, RequestOutput | Exception]") -> None:
        """Have the loop put each output, or exception, into its mailbox. Any thread may call this.

        Raises RuntimeError if the loop has closed.
        """
        with self._lock:
            was_empty = not self._unsent  # otherwise the loop was woken before, and will deliver these, too
            self._unsent |= outputs
        if was_empty or self.loop.is_closed():  # in a closed loop, the call below raises RuntimeError
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Put all outputs that were sent since the last call into their mailboxes. The loop calls this."""
        with self._lock:
            outputs, self._unsent = self._unsent, {}
        for mailbox, output in outputs.items():
            mailbox.put(output)


class Mailbox:
    """Holds the latest output of one request, in its reader's event loop, which calls `put` and `take`."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.unread: RequestOutput | Exception | None = None
        self.num_tokens_sent = 0  # in the last output sent here: the engine's thread writes and reads it
        self._filled: asyncio.Future | None = None  # the future that the reader awaits

    def put(self, output: RequestOutput | Exception) -> None:
        """Store an output, and wake the reader if it waits. The output replaces an unread one, since each
        output contains the earlier ones. Does not raise, whether or not a reader waits.
        """
        self.unread = output
        if self._filled and not self._filled.done():
            self._filled.set_result(None)

    async def take(self) -> RequestOutput | Exception:
        """Wait until an output is unread, and return it: once it is taken, no output is unread.

        Returns at once if one is unread already. Otherwise waits for a future that `put` fulfils: a new one
        for each wait, since a future is done for ever.
        """
        while self.unread is None:
            self._filled = self.post.loop.create_future()
            await self._filled
        output, self.unread = self.unread, None
        return output


class Reader:
    """An asynchronous iterator over the outputs of one request.

    Each output contains all tokens so far; the last output is `finished`. The request begins when the first
    output is asked for. The request is aborted if its reader leaves early: calls `aclose`, is cancelled, or
    drops the iterator. A Reader belongs to the event loop of its mailbox.
    """

    def __init__(
        self, mailbox: Mailbox, begin: Callable[[], None], abort: Callable[[], None], tokens: int
    ) -> None:
        """`begin` queues the request, `abort` ends it. `tokens` is the most tokens that all samples of the
        request can have together, prompts included; Part 15 limits the sum over requests.
        """
        self._mailbox, self._begin, self._abort, self.tokens = mailbox, begin, abort, tokens
        self._begun = self._ended = False

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for an unread output, and return the latest.

        Raises ParameterError if the request failed by a field of its own, EngineError if it failed otherwise,
        and any exception that was put in place of an output.
        """
        if self._ended:
            raise StopAsyncIteration
        if not self._begun:
            self._begin()
            self._begun = True
        try:
            output = await self._mailbox.take()
            if isinstance(output, Exception):
                raise output
            if output.error and output.error_field:
                raise ParameterError(output.error_field, output.error)
            if output.error:
                raise EngineError(output.error)
        except BaseException:
            self._leave()
            raise
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it has begun and not finished. The iterator gives no more outputs."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Abort the request if it has begun and not ended. Only the first call does."""
        if self._begun and not self._ended:
            self._abort()
        self._ended = True
