"""The engine in a thread of its own, so that an event loop can serve many users. Part 6.

The event loop never computes a step. The step loop never waits for a reader: outputs are cumulative, so a
slow reader finds the latest output and misses no token. `EngineThread` is a `Backend` of the server.

An event loop calls the engine itself for `make_requests` and `slow_work` only, which any thread may call. All
else that event loops and other threads want of the engine is queued as a command, a function that the
engine's thread calls between two steps. So the engine needs no lock.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from engine.core.llm_engine import LLMEngine
from engine.core.mailbox import EngineError, Mailbox, Post, Reader
from engine.core.one_at_a_time import OneAtATime
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import NoRoomError, ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.requests.listeners import Listener
from engine.requests.request import Request, error_text

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SHORT_PROMPT = 1000  # characters or ids; tokenizing a shorter prompt costs less than a call in another thread
MAX_PREPARING = 32  # constraints that wait to be compiled (Extension B)
FAIL_SECONDS = 1  # how long `fail` waits for the current step
STOP_SECONDS = 30  # how long `stop` waits for the current step; a step that takes longer is taken to hang


class EngineThread:
    """Runs an engine's steps in a thread, and offers `generate` to event loops.

    Use an EngineThread as an async context manager, or call `start` and `stop`, one of them at a time.
    `generate`, `between_steps` and `abort` may be awaited in several event loops at once.
    """

    def __init__(
        self,
        engine: LLMEngine,
        name: str,
        aliases: Sequence[str] = (),
        max_preparing: float = MAX_PREPARING,
    ) -> None:
        """`name` is the model's name in users' requests, and `aliases` are further names of it. At most
        `max_preparing` constraints wait to be compiled (`preparing`).
        """
        self.engine, self.name, self.aliases = engine, name, aliases
        self.supports = engine.supports
        # A reader gets a further output after this many new tokens per sample. Outputs up to the first with a
        # token, and the last output, are sent at once. Part 14 sets the number.
        self.stream_interval = 1
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards `_running` (no command is queued once the thread has ended), `_uncalled` and `_posts`.
        self._lock = threading.RLock()
        self._running = self._stopping = False
        self._mailboxes: dict[str, Mailbox] = {}  # by request id; only the engine's thread changes it
        self._uncalled: set[Future] = set()  # of `between_steps`: those whose function is not called yet
        self._posts: WeakValueDictionary[asyncio.AbstractEventLoop, Post] = WeakValueDictionary()
        self._thread: threading.Thread | None = None
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self.preparing = OneAtATime("constraints", max_preparing)
        engine.on_lost.append(self.fail)

    def start(self) -> None:
        """Start the step loop, unless it runs already.

        Raises EngineError if a step of the last run hangs in the old thread.
        """
        if self._running:
            return
        if self._thread and self._thread.is_alive():
            raise EngineError("the engine has been stopped, and its last step has not come back")
        self._running, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the step loop, and abort unfinished requests.

        If the current step takes longer than STOP_SECONDS, this method leaves the step in its thread, logs
        that, and raises EngineError in all readers. The thread is a daemon, so the process can exit; if the
        step returns later, the loop ends then.
        """
        with suppress(EngineError):  # the loop has ended already
            self._command(self._stop)
        why = f"the engine is stopped, but its last step has not come back in {STOP_SECONDS} s"
        if not self._wait_for_end(STOP_SECONDS, why):
            logger.critical(why)

    def fail(self, cause: BaseException) -> None:
        """End the step loop because no step can be computed any more. Any thread may call this.

        `cause` is an exception that ends the loop, such as a lost rank's (Extension A): one that is no
        `Exception`, since the loop goes on after those.

        Every reader gets EngineError with the cause, and `health` returns False. If the current step takes
        longer than FAIL_SECONDS, this method leaves the step in its thread.
        """

        def raise_cause() -> None:
            raise cause

        with suppress(EngineError):  # the loop has ended already
            self._command(raise_cause)
        if self._thread is not threading.current_thread():
            self._wait_for_end(FAIL_SECONDS, f"the engine has ended: {error_text(cause)}")

    def _wait_for_end(self, seconds: float, why: str) -> bool:
        """Wait up to `seconds` for the thread to end, and return whether it has ended. If not, its step is
        left alone, and all readers get EngineError(why).
        """
        if self._thread is None:
            return True
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return True
        with self._lock:
            self._running = False
        self._give_up(why)
        return False

    async def __aenter__(self) -> "EngineThread":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def models(self) -> list[str]:
        """The names under which users may ask for the model."""
        return [self.name, *self.aliases]

    def health(self) -> bool:
        """Whether the step loop runs."""
        return self._is_running()

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str, **options) -> Reader:
        """Check a request, and return an iterator over its outputs. The first `__anext__` queues the request.

        `options` are those of `LLMEngine.make_requests`. Raises ParameterError for a field or a prompt that
        the engine refuses, and NoRoomError if the request has a constraint and too many wait to be compiled.
        For what the iterator raises, see `Reader`.
        """
        try:
            samples = await self._make_requests(request_id, prompt, params, **options)
        except (ParameterError, NoRoomError) as error:
            self._tell_of_refusal(request_id, error)
            raise
        mailbox = Mailbox(self._post())

        def begin() -> None:
            self._command(lambda: self._add(request_id, samples, prompt, mailbox))

        def abort() -> None:
            with suppress(EngineError):  # the loop has ended, and the request with it
                self._command(lambda: self._abort(request_id, mailbox))

        num_tokens = sum(request.num_prompt_tokens + request.output.limit for request in samples)
        return Reader(mailbox, begin, abort, num_tokens)

    def _tell_of_refusal(self, request_id: str, error: Exception) -> None:
        """Have the engine's thread tell its listeners of a refused request."""
        listeners = self.engine.listeners
        with suppress(EngineError):  # the loop has ended, and nobody listens
            self._command(lambda: listeners.tell(Listener.on_reject, request_id, error))

    async def _make_requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams, **options
    ) -> list[Request]:
        """`LLMEngine.make_requests`, with what takes long done in other threads, so that the event loop goes
        on: the engine's `slow_work`, and the tokenizing of a long prompt.
        """
        for work in self.engine.slow_work(params):
            await self.preparing.call(work)

        def make() -> list[Request]:
            return self.engine.make_requests(request_id, prompt, params, **options)

        if len(prompt) <= SHORT_PROMPT:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, make)

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Have the engine's thread call `function` between two steps.

        Returns and raises what `function` returns and raises. Raises EngineError if the engine does not run,
        or ends before the call or by it.
        """
        loop, future = asyncio.get_running_loop(), Future[Result]()

        def call() -> None:
            with self._lock:
                if future not in self._uncalled:  # `_give_up` has set an exception
                    return
                self._uncalled.remove(future)
            if not future.set_running_or_notify_cancel():  # the caller waits no more
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # such as SystemExit, which ends the thread
                future.set_exception(EngineError(error_text(error)))
                raise

        with self._lock:  # in one go: `call` and `_give_up` look for the future in `_uncalled`
            self._command(call)
            self._uncalled.add(future)
        return await asyncio.wrap_future(future, loop=loop)

    async def abort(self, request_id: str) -> None:
        """Stop a request, if it runs or waits. Its reader gets a last output with finish reason "abort"."""
        with suppress(EngineError):  # the loop has ended, and the request with it
            self._command(lambda: self._abort(request_id))

    def _post(self) -> Post:
        """The `Post` of the running event loop. The readers of that loop keep it alive."""
        loop = asyncio.get_running_loop()
        with self._lock:
            post = self._posts.get(loop)
            if post is None:
                post = Post(loop)
                self._posts[loop] = post
        return post

    def _give_up(self, why: str) -> None:
        """Raise EngineError in every reader and every `between_steps`, without a call to the engine."""
        with self._lock:
            futures, self._uncalled = self._uncalled, set()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(why))
        for mailbox in list(self._mailboxes.values()):
            with suppress(RuntimeError):  # the reader's loop has closed
                mailbox.post.send({mailbox: EngineError(why)})

    def _command(self, function: Callable[[], None]) -> None:
        """Have the engine's thread call `function`. Raises EngineError if the thread has ended."""
        with self._lock:
            if not self._is_running():
                raise EngineError("the engine is not running")
            self._commands.put(function)

    def _is_running(self) -> bool:
        """Whether the thread runs in this process: a fork does not copy threads."""
        return self._running and self._thread is not None and self._thread.is_alive()

    # From here on, everything runs in the engine's thread.

    def _run(self) -> None:
        """The step loop: run queued commands, compute a step, deliver its outputs. Without an unfinished
        request, wait for a command.
        """
        cause: BaseException | None = None  # the exception that ended the thread
        try:
            while not self._stopping:
                try:
                    if self._commands.empty() and self.engine.has_unfinished_requests():
                        self._deliver(self.engine.step())
                    else:
                        self._run_command()
                except Exception as error:
                    logger.exception("the engine failed outside a step's forward pass")
                    self._fail_all(error)
        except BaseException as error:  # such as SystemExit
            logger.critical("the engine's thread has died", exc_info=True)
            cause = error
        with self._lock:
            self._running = False
        self._end(cause)

    def _run_command(self) -> None:
        """Wait for a command and run it. This is a method of its own so that an idle loop has no variable
        that keeps the last command, and its request, alive.
        """
        command = self._commands.get()
        command()

    def _end(self, cause: BaseException | None) -> None:
        """Run the commands that are still queued, then end every remaining reader: with a last output
        ("abort"), or with `cause`, the error that ended the thread. No new command can be queued by now.
        """
        while not self._commands.empty():
            try:
                self._run_command()
            except BaseException as error:
                logger.critical("the engine failed while it ended", exc_info=True)
                cause = cause or error
        try:
            if cause:
                self._fail_all(cause)
            for request_id in self.engine.unfinished_request_ids():
                self._abort(request_id)
        except BaseException as error:
            logger.critical("the engine failed while it ended", exc_info=True)
            cause = cause or error
        # Readers that the code above did not reach because it failed must not wait for ever.
        self._give_up(f"the engine has ended: {error_text(cause)}" if cause else "the engine has ended")
        self._mailboxes.clear()

    def _stop(self) -> None:
        """End the loop after the present command."""
        self._stopping = True

    def _add(self, request_id: str, samples: list[Request], prompt: Prompt, mailbox: Mailbox) -> None:
        """Queue a request whose outputs go to `mailbox`. If the engine refuses it, its error goes there."""
        try:
            self.engine.add(request_id, samples, prompt)
            self._mailboxes[request_id] = mailbox
        except Exception as error:  # fails this request only
            if isinstance(error, ParameterError):
                self.engine.listeners.tell(Listener.on_reject, request_id, error)
            self._send({mailbox: error})
        except BaseException as error:  # such as SystemExit, which ends the thread
            self._send({mailbox: EngineError(error_text(error))})
            raise

    def _abort(self, request_id: str, mailbox: Mailbox | None = None) -> None:
        """Abort a request. With `mailbox`, abort only if the request is still that reader's: another user may
        have taken the id for a new request.
        """
        if mailbox is None or self._mailboxes.get(request_id) is mailbox:
            output = self.engine.abort_request(request_id)
            if output:
                self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to their readers."""
        by_mailbox: dict[Mailbox, RequestOutput | Exception] = {}
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:  # the request was added to the engine directly, and has no reader here
                continue
            if output.finished:
                del self._mailboxes[output.request_id]
            elif self.stream_interval > 1 and not self._is_due(output, mailbox):
                continue
            by_mailbox[mailbox] = output
        if by_mailbox:
            self._send(by_mailbox)

    def _is_due(self, output: RequestOutput, mailbox: Mailbox) -> bool:
        """Whether an unfinished output is sent now (`stream_interval`). Counts its tokens as sent if so."""
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        num_new = num_tokens - mailbox.num_tokens_sent
        if mailbox.num_tokens_sent and num_new < self.stream_interval * len(output.outputs):
            return False
        mailbox.num_tokens_sent = num_tokens
        return True

    def _send(self, by_mailbox: dict[Mailbox, RequestOutput | Exception]) -> None:
        """Send each output or exception to its mailbox, with one call for each event loop. If a loop has
        closed, nobody reads there any more, so its readers' requests are aborted.
        """
        by_post: dict[Post, dict[Mailbox, RequestOutput | Exception]] = {}
        for mailbox, output in by_mailbox.items():
            by_post.setdefault(mailbox.post, {})[mailbox] = output
        for post, outputs in by_post.items():
            try:
                post.send(outputs)
            except RuntimeError:  # the loop has closed
                self._abort_readers_of(post)

    def _abort_readers_of(self, post: Post) -> None:
        """Abort all requests that are read in the event loop of `post`."""
        request_ids = [key for key, mailbox in self._mailboxes.items() if mailbox.post is post]
        for request_id in request_ids:
            self._mailboxes.pop(request_id)
            self.engine.abort_request(request_id)

    def _fail_all(self, error: BaseException) -> None:
        """End all requests with an error that belongs to no single request."""
        for request_id in self.engine.unfinished_request_ids():
            output = self.engine.abort_request(request_id)
            assert output is not None  # an unfinished request has an output
            output.error = error_text(error)
            self._deliver([output])
