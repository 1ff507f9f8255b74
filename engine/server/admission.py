"""Admission control: a backend that wraps another and admits only what the server has room for. Part 15.

Promises that the admitted requests stay within `QueueLimits`; that a request is admitted with all its samples
or not at all; that a request ends by its deadline, or when its reader next reads; and that a request's places
are given back as soon as the request ends or fails, or its client leaves. Works with any `Backend`.

A request that is not served gets an error in OpenAI's shape; `code` names the reason:

| status | code | when | Retry-After |
|---|---|---|---|
| 429 | queue_full | the queue has no room now for the whole request | yes: see `Capacity.retry_after` |
| 400 | request_too_large | the request is larger than the whole queue | no |
| 503 | queue_timeout | the request's deadline came before its first token | yes |
| 503 | shutting_down | the server is shutting down; adds `Connection: close` | yes: when the server is gone |
| 503 | engine_stuck | the engine has work, and has been silent for STUCK_SECONDS | no: the time is unknown |
| 503 | engine_down | the engine has ended | no |

The errors `queue_full` and `queue_timeout` also say the time in milliseconds, in the header `retry-after-ms`,
which the openai client reads first. That time may be less than a second, which Retry-After cannot say.

While MAX_REQUESTS requests are under way, middleware.py refuses a new one before admission: 503, server_full.

The status of a stream cannot change once the stream has begun; the error's body is then sent as an event. A
request that has a token at its deadline, or when the shutdown ends it, is not an error: the answer has status
200, the tokens so far, and finish_reason "abort".
"""

import asyncio
import math
from dataclasses import replace
from typing import Literal, Self, get_args

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream
from engine.server.capacity import MIN_RETRY_SECONDS, Capacity
from engine.server.deadline import Arrival, this_arrival
from engine.server.errors import RequestError
from engine.server.watch import StepWatch
from engine.server.wrapped_backend import WrappedBackend

Code = Literal[
    "queue_full", "request_too_large", "queue_timeout", "shutting_down", "engine_stuck", "engine_down"
]  # fmt: skip
EndReason = Literal["queue_timeout", "shutting_down"]  # why a request ends before it is done
REFUSED: tuple[Code, ...] = get_args(Code)
CUT_SHORT: tuple[EndReason, ...] = get_args(EndReason)


class AdmittedStream:
    """The stream of an admitted request. Holds the request's places in the queue until the stream is over."""

    def __init__(self, admission: "Admission", stream: OutputStream, sequences: int, ends_at: float) -> None:
        """`sequences`: how many sequences the request has taken places for. `ends_at`: the request's
        deadline, in seconds of the event loop's clock; infinity means no deadline.
        """
        self.tokens, self.sequences = stream.tokens, sequences
        self._admission, self._stream = admission, stream
        self._ends_at = ends_at
        self._end_reason: EndReason = "queue_timeout"  # why the request ends at `_ends_at`
        self._reader_timeout: asyncio.Timeout | None = None  # around the wait of a reader
        self._latest: RequestOutput | None = None
        self.has_begun = False  # whether a reader has started to read
        self._is_over = False  # whether the places are given back
        if admission.has_ended_all:
            self.end("shutting_down")

    def end(self, reason: EndReason) -> None:
        """End the stream now."""
        self._ends_at = -math.inf
        self._end_reason = reason
        # An expired timeout cannot be rescheduled.
        if self._reader_timeout and not self._reader_timeout.expired():
            self._reader_timeout.reschedule(self._ends_at)

    def __aiter__(self) -> Self:
        self.has_begun = True  # the engine starts work on a stream at the first read
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output of `_stream`. From `_ends_at` on: the result of `_cut_short`, even if an output is
        ready.

        The wait must end at `_ends_at`, also when `end` moves `_ends_at` during the wait: `_reader_timeout`
        is the `asyncio.timeout_at` around the wait, and None while no reader waits.

        A finished output or an error calls `aclose` at once, so that a slow reader holds no places. Raises
        StopAsyncIteration once the stream is over.
        """
        if self._is_over:
            raise StopAsyncIteration
        if asyncio.get_running_loop().time() >= self._ends_at:
            return await self._cut_short()
        timeout = asyncio.timeout_at(None if self._ends_at == math.inf else self._ends_at)
        try:
            async with timeout as self._reader_timeout:
                self._latest = await anext(self._stream)
        except BaseException as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                return await self._cut_short()
            await self.aclose()
            raise
        finally:
            self._reader_timeout = None
        if self._latest.finished:
            await self.aclose()
        return self._latest

    async def _cut_short(self) -> RequestOutput:
        """Close the stream and return its latest output as finished; running samples get the reason "abort".

        Raises RequestError if no sample has a token yet.
        """
        await self.aclose()
        latest = self._latest
        if latest is None or not any(sample.token_ids for sample in latest.outputs):
            raise self._admission.refusal(self._end_reason)
        self._admission.cut_short[self._end_reason] += 1
        samples = [
            replace(sample, finish_reason=sample.finish_reason or "abort") for sample in latest.outputs
        ]
        return replace(latest, outputs=samples, finished=True)

    async def aclose(self) -> None:
        """Give the places back, and abort the request if the request is unfinished. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._admission.give_back(self)
            await self._stream.aclose()


class Admission(WrappedBackend):
    """A backend that admits a request if the queue has room, and refuses the request otherwise."""

    def __init__(
        self,
        backend: Backend,
        capacity: Capacity,
        request_timeout: float | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """`request_timeout`: the operator's bound on every request, in seconds from its arrival; None: no
        bound. `watch` detects an engine that hangs; with None, nothing does.

        Raises ValueError if `request_timeout` is not above 0.
        """
        if request_timeout is not None and not request_timeout > 0:
            raise ValueError(f"request_timeout={request_timeout}: a number of seconds above 0 is accepted")
        super().__init__(backend)
        self.capacity = capacity
        self.request_timeout, self.watch = request_timeout, watch
        self.refused: dict[str, int] = dict.fromkeys(REFUSED, 0)  # code -> number of requests
        self.cut_short: dict[str, int] = dict.fromkeys(CUT_SHORT, 0)  # EndReason -> number of requests
        self._admitted: set[AdmittedStream] = set()
        self._closes_at: float | None = None  # during a shutdown: when the server will have ended
        self.has_ended_all = False  # whether `end_all` was called

    def health(self) -> bool:
        """True if requests can be served. Raises RequestError, with the reason, if they cannot."""
        code = self._unavailable_code()
        if code is not None:
            raise self._error(code)
        return True

    @property
    def idle(self) -> bool:
        """Whether no request is admitted and none is being checked."""
        return not self.capacity.sequences

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> AdmittedStream:
        """Check a request and admit it. Raises RequestError (the module's table) or the backend's error.

        1. Refuse the request if no request can be served (`_unavailable_code`). Compute its deadline, which
           counts from `this_arrival`.
        2. `_take` places for the request's n sequences before the backend is called: other requests arrive
           while the backend turns the prompt into tokens.
        3. Call the backend. The backend checks the request and returns a stream; `stream.tokens` is the
           largest number of tokens that the request may have.
        4. `_take` places for these tokens; if that fails, close the stream.
        5. Return an `AdmittedStream`, and keep it in `_admitted`, where `end_all` finds it.

        After any failure in 3 or 4, a cancellation included, all places of the request are given back. The
        engine has not begun the request then, so the places must not count for the pace.
        """
        code = self._unavailable_code()
        if code is not None:
            raise self.refusal(code)
        arrival = this_arrival()
        ends_at = arrival.deadline(self.request_timeout)
        self._take(arrival, sequences=params.n, tokens=0)
        try:
            stream = await self.backend.generate(prompt, params, request_id, **options)
            try:
                self._take(arrival, sequences=0, tokens=stream.tokens)
            except RequestError:
                await stream.aclose()
                raise
        except BaseException:
            self.capacity.give_back(sequences=params.n, tokens=0, has_begun=False)
            raise
        admitted = AdmittedStream(self, stream, params.n, ends_at)
        self._admitted.add(admitted)
        return admitted

    def _take(self, arrival: Arrival, sequences: int, tokens: int) -> None:
        """Take places for so many more sequences and tokens of the HTTP request `arrival`.

        Raises RequestError if there is no room: "request_too_large" if an empty queue has no room for all
        that the HTTP request has asked for so far, else "queue_full".
        """
        arrival.sequences += sequences
        arrival.tokens += tokens
        if self.capacity.fits(sequences, tokens):
            self.capacity.take(sequences, tokens)
        elif self.capacity.could_ever_fit(arrival.sequences, arrival.tokens):
            raise self.refusal("queue_full", sequences, tokens)
        else:
            raise self.refusal("request_too_large", arrival.sequences, arrival.tokens)

    def give_back(self, admitted: AdmittedStream) -> None:
        """Free the places of a stream that is over: its sequences and its tokens."""
        self._admitted.discard(admitted)
        self.capacity.give_back(admitted.sequences, admitted.tokens, has_begun=admitted.has_begun)

    def begin_shutdown(self, seconds: float) -> None:
        """Refuse every new request from now on. Admitted requests go on; the server ends in `seconds`."""
        self._closes_at = asyncio.get_running_loop().time() + seconds

    def end_all(self) -> None:
        """End every admitted request with the tokens it has. A request that is being checked now ends as soon
        as it is admitted.
        """
        self.has_ended_all = True
        for admitted in list(self._admitted):
            admitted.end("shutting_down")

    def refusal(self, code: Code, sequences: int = 0, tokens: int = 0) -> RequestError:
        """The error with this code, as from `_error`; also counts the refusal in `refused`."""
        self.refused[code] += 1
        return self._error(code, sequences, tokens)

    def _unavailable_code(self) -> Code | None:
        """The code of the error if no request can be served now; None if requests can be served."""
        if self._closes_at is not None:
            return "shutting_down"
        if not self.backend.health():
            return "engine_down"
        if self.watch is not None and self.watch.is_stuck():
            return "engine_stuck"
        return None

    def _error(self, code: Code, sequences: int = 0, tokens: int = 0) -> RequestError:
        """The error with this code. `sequences`, `tokens`: the amounts for which there was no room."""
        match code:
            case "queue_full":
                reason = f"the queue is full: {self.capacity.sequences} sequences are in it"
                return self._try_again_error(429, code, reason, self.capacity.retry_after(sequences, tokens))
            case "queue_timeout":
                reason = "this request's time was over before its first token: the queue is long"
                return self._try_again_error(503, code, reason, self.capacity.retry_after(sequences, tokens))
            case "request_too_large":
                return self._too_large_error(sequences, tokens)
            case "shutting_down":
                now = asyncio.get_running_loop().time()
                # Until the server has ended. `end_all` may come without `begin_shutdown`.
                wait = 0.0 if self._closes_at is None else self._closes_at - now
                message, headers = "the server is shutting down", {"Connection": "close"}
                return RequestError(503, message, code=code, retry_after=math.ceil(wait), headers=headers)
            case "engine_stuck":
                assert self.watch is not None  # `_unavailable_code` has called `watch.is_stuck`
                silent = round(self.watch.silent_seconds())
                message = f"the engine has been silent for {silent} s: its last step has not come back"
                return RequestError(503, message, code=code)
            case "engine_down":
                return RequestError(503, "the engine has ended", code=code)

    def _try_again_error(self, status: int, code: str, reason: str, wait: float) -> RequestError:
        """The error of a request that may come again in `wait` seconds, with both headers that say so.

        Both are rounded down, Retry-After to 1 at least: a client that comes back too late leaves a seat
        empty (see `Capacity.retry_after`).
        """
        wait = max(MIN_RETRY_SECONDS, wait)
        seconds = max(1, math.floor(wait))
        headers = {"retry-after-ms": str(math.floor(1000 * wait))}
        message = f"{reason}; try again in {seconds} s"
        return RequestError(status, message, code=code, retry_after=seconds, headers=headers)

    def _too_large_error(self, sequences: int, tokens: int) -> RequestError:
        """The error of a request for which an empty queue has no room. It names the limit that is too low."""
        limits = self.capacity.limits
        if sequences > limits.max_num_queued_reqs:
            param = "n"
            size = f"{sequences} sequences"
            limit = limits.max_num_queued_reqs
        else:
            param = "max_tokens"
            size = f"{tokens} tokens with its answers"
            limit = limits.max_num_queued_tokens
        message = f"this request comes to {size}: the whole queue has room for {limit}"
        return RequestError(400, message, param=param, code="request_too_large")
