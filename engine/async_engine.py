"""The engine in a thread of its own, so that an event loop can serve many users. Part 6.

Promises that the event loop never computes and the step loop never waits for a reader: outputs are
cumulative, so a slow reader simply finds the latest. It is the server's `Backend`.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.llm_engine import LLMEngine
from engine.scheduling.request import Request

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The request failed in the engine, through no fault of its own; the message says why."""


class Mailbox:
    """One request's latest output, handed from the engine's thread to an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """From the engine's thread. An output that was not read yet is replaced: the new one contains it."""
        try:
            self._loop.call_soon_threadsafe(self._put, output)
        except RuntimeError:  # the reader's loop is gone, and the reader with it
            logger.debug("a reader's event loop has closed")

    def _put(self, output: RequestOutput | Exception) -> None:
        self._output = output
        self._filled.set()

    async def get(self) -> RequestOutput:
        """The latest output, once there is one that was not read. Raises what was put in its place."""
        await self._filled.wait()
        self._filled.clear()
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


class AsyncLLMEngine:
    """`generate` for event loops. Use as an async context manager, or call `start` and `stop`."""

    def __init__(self, engine: LLMEngine, name: str) -> None:
        """`name` is the model's, as users will ask for it."""
        self.engine, self.name = engine, name
        self.supports = engine.supports
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}  # touched by the engine's thread only
        self._thread: threading.Thread | None = None
        self._checking = ThreadPoolExecutor(1, "check")  # one text at a time is turned into tokens

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the step loop; unfinished requests are aborted."""
        if self._thread:
            self._commands.put(None)
            self._thread.join()
        self._checking.shutdown()
        self._checking = ThreadPoolExecutor(1, "check")

    async def __aenter__(self) -> "AsyncLLMEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def models(self) -> list[str]:
        return [self.name]

    def health(self) -> bool:
        """Whether the step loop is running."""
        return self._thread is not None and self._thread.is_alive()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they grow, the last one finished; leaving early aborts it.

        Raises ParameterError for what the engine refuses, EngineError from the iterator for a failed step.
        """
        make = partial(self.engine.make_requests, request_id, prompt, params, **options)
        try:
            samples = await asyncio.get_running_loop().run_in_executor(self._checking, make)
        except ParameterError as error:
            rejected = error
            self._commands.put(lambda: self.engine.listeners.tell("on_reject", request_id, rejected))
            raise
        return self._outputs(request_id, samples, prompt)

    async def _outputs(
        self, request_id: str, samples: list[Request], prompt: Prompt
    ) -> AsyncGenerator[RequestOutput, None]:
        mailbox = Mailbox()
        self._commands.put(lambda: self._add(request_id, samples, prompt, mailbox))
        finished = False
        try:
            while not finished:
                output = await self._next(mailbox)
                finished = output.finished
                if output.error:
                    raise EngineError(output.error)
                yield output
        finally:
            if not finished:
                self._commands.put(lambda: self._abort(request_id, mailbox))

    async def _next(self, mailbox: Mailbox) -> RequestOutput:
        """The mailbox's next output. Raises EngineError when none can come any more."""
        while True:
            try:
                async with asyncio.timeout(1.0):
                    return await mailbox.get()
            except TimeoutError:
                if not self.health():
                    raise EngineError("the engine is not running") from None

    async def abort(self, request_id: str) -> None:
        """Stop a request; whoever reads it gets a last output with finish reason "abort"."""
        self._commands.put(lambda: self._abort(request_id))

    # From here on, everything runs in the engine's thread.

    def _add(self, request_id: str, samples: list[Request], prompt: Prompt, mailbox: Mailbox) -> None:
        try:
            self.engine.add(request_id, samples, prompt)
            self._mailboxes[request_id] = mailbox
        except Exception as error:  # this request's own: the others do not notice
            mailbox.put(error)

    def _abort(self, request_id: str, mailbox: Mailbox | None = None) -> None:
        """Abort a request; with `mailbox`, only if it is still that reader's."""
        if mailbox is None or self._mailboxes.get(request_id) is mailbox:
            output = self.engine.abort_request(request_id)
            if output:
                self._deliver([output])

    def _run(self) -> None:
        """The step loop: take in what came, step, hand out; sleep when there is nothing to do."""
        while True:
            try:
                while not self._commands.empty() or not self.engine.has_unfinished_requests():
                    command = self._commands.get()
                    if command is None:
                        return self._abort_all()
                    command()
                self._deliver(self.engine.step())
            except Exception as error:
                logger.exception("the engine failed outside a step's forward pass")
                self._fail_all(error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox:  # none: a request that was added to the engine itself
                mailbox.put(output)
            if output.finished:
                self._mailboxes.pop(output.request_id, None)

    def _abort_all(self) -> None:
        for request_id in self.engine.unfinished_request_ids():
            self._abort(request_id)

    def _fail_all(self, error: Exception) -> None:
        """What cannot be pinned on one request ends all of them; the engine goes on empty."""
        for request_id in self.engine.unfinished_request_ids():
            output = self.engine.abort_request(request_id)
            output.error = f"{type(error).__name__}: {error}"
            self._deliver([output])
