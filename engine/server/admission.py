"""Admission control: a backend around a backend that takes on no more than it can serve. Part 15.

Promises that what is admitted stays within `QueueLimits`; that a request is admitted with all its samples or
not at all; that each ends by its deadline; and that its places come back the moment it has ended, has failed,
or its client has left. Knows no engine: any `Backend` will do.

A request that is not served is refused at once, in OpenAI's shape, with a `code` that says why:

| status | code | when | Retry-After |
|---|---|---|---|
| 429 | queue_full | there is no room for all of it now | yes: before a seat is empty (`Capacity`) |
| 400 | request_too_large | it is more than the whole queue: there will never be room | no |
| 503 | queue_timeout | its deadline came before its first token | yes |
| 503 | shutting_down | the server ends; `Connection: close` | yes: when it will be gone |
| 503 | engine_stuck | the engine has work, and has been silent for STUCK_SECONDS | no: it is not known |
| 503 | engine_down | the engine has ended | no |

A request that finds MAX_REQUESTS under way does not come so far: 503, server_full (gates.py).

429 says: all clients together ask for too much at once. 503 says: this server cannot serve any request. A
stream that has begun cannot change its status: it gets the same body as an error event. A request that has a
token when its deadline comes, or the shutdown's, keeps what is there: finish_reason "abort", with status 200.
"""

import asyncio
import math
from dataclasses import replace
from typing import Self

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream
from engine.server.capacity import Capacity
from engine.server.deadline import Arrival, this_arrival
from engine.server.errors import RequestError
from engine.server.watch import StepWatch

REFUSED = ("queue_full", "request_too_large", "queue_timeout", "shutting_down", "engine_stuck", "engine_down")
CUT_SHORT = ("queue_timeout", "shutting_down")  # why a running request had to end


class AdmittedStream:
    """The stream of an admitted request. It holds the request's places in the queue until it is over."""

    def __init__(self, admission: "Admission", stream: OutputStream, sequences: int, ends_at: float) -> None:
        """`sequences`: its places. `ends_at`: its deadline, by the event loop's clock; infinity: none."""
        self.tokens = stream.tokens
        self._admission, self._stream, self._sequences = admission, stream, sequences
        self._ends_at = ends_at
        self._end_reason = "queue_timeout"  # one of CUT_SHORT: why it ends then
        self._reader_timeout: asyncio.Timeout | None = None
        self._latest: RequestOutput | None = None
        self.has_begun = False  # whether it was read
        self._is_over = False  # whether its places are given back
        if admission.has_ended_all:
            self.end("shutting_down")

    def end(self, reason: str) -> None:
        """Let the stream end now, for this reason (one of CUT_SHORT)."""
        self._ends_at = -math.inf
        self._end_reason = reason
        # An expired timeout cannot be rescheduled.
        if self._reader_timeout and not self._reader_timeout.expired():
            self._reader_timeout.reschedule(self._ends_at)

    def __aiter__(self) -> Self:
        self.has_begun = True  # as in the engine: a stream that is never read costs no work
        return self

    async def __anext__(self) -> RequestOutput:
        """The stream's next output, if it is there before `_ends_at`; else, once that has come, `_cut_short`.

        Waiting must itself end at that time, also when `end` changes it meanwhile: `_reader_timeout` is the
        `asyncio.timeout_at` around it, and None while no reader waits. A finished output closes this at
        once, and so does an error: a slow reader holds no places. What is over gives nothing more.
        """
        if self._is_over:
            raise StopAsyncIteration
        if asyncio.get_running_loop().time() >= self._ends_at:
            return await self._cut_short()
        waiting = asyncio.timeout_at(None if self._ends_at == math.inf else self._ends_at)
        try:
            async with waiting as self._reader_timeout:
                self._latest = await anext(self._stream)
        except BaseException as error:
            if isinstance(error, TimeoutError) and waiting.expired():
                return await self._cut_short()
            await self.aclose()
            raise
        finally:
            self._reader_timeout = None
        if self._latest.finished:
            await self.aclose()
        return self._latest

    async def _cut_short(self) -> RequestOutput:
        """The latest output as the last: samples that still run get the reason "abort". Raises RequestError:
        there is no token yet.
        """
        await self.aclose()
        latest = self._latest
        if latest is None or not any(sample.token_ids for sample in latest.outputs):
            raise self._admission.refusal(self._end_reason)
        self._admission.cut_short[self._end_reason] += 1
        samples = [replace(s, finish_reason=s.finish_reason or "abort") for s in latest.outputs]
        return replace(latest, outputs=samples, finished=True)

    async def aclose(self) -> None:
        """Give the places back, and abort the request if it is unfinished. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._admission.give_back(self, self._sequences)
            await self._stream.aclose()


class Admission:
    """A backend that admits the requests there is room for, and refuses the others."""

    def __init__(
        self,
        backend: Backend,
        capacity: Capacity,
        request_timeout: float | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """`request_timeout`: seconds for a request, from its arrival; None: as long as it takes. `watch`
        notices an engine that hangs. Raises ValueError.
        """
        if request_timeout is not None and not request_timeout > 0:
            raise ValueError(f"request_timeout={request_timeout}: a number of seconds above 0 is accepted")
        self.backend, self.capacity = backend, capacity
        self.request_timeout, self.watch = request_timeout, watch
        self.supports = backend.supports
        self.refused = dict.fromkeys(REFUSED, 0)  # by code: how often
        self.cut_short = dict.fromkeys(CUT_SHORT, 0)  # by reason: how often
        self._admitted: set[AdmittedStream] = set()
        self._closes_at: float | None = None  # when the server will have ended, once it is to end
        self.has_ended_all = False  # whether `end_all` was called

    async def __aenter__(self) -> Self:
        await self.backend.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.backend.__aexit__(*details)

    def models(self) -> list[str]:
        return self.backend.models()

    def health(self) -> bool:
        """Whether requests can be served; or RequestError, which says why not."""
        if why := self._trouble():
            raise self._error(why)
        return True

    @property
    def idle(self) -> bool:
        """Whether no request is admitted, or being checked."""
        return not self.capacity.sequences

    async def abort(self, request_id: str) -> None:
        await self.backend.abort(request_id)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> AdmittedStream:
        """Check a request and admit it, or raise: RequestError by the table above, or what the backend says.

        1. Can any request be served (`_trouble`)? By when must it be over?
        2. Its n sequences `_take` their places first: while its prompt becomes tokens, other requests come.
        3. The backend checks it, and says how many tokens it may come to (`stream.tokens`).
        4. These take their places, too, or the stream is closed. Whatever goes wrong, also if this is
           cancelled, all places are given back; the engine has not begun, so they tell of no pace.
        """
        if why := self._trouble():
            raise self.refusal(why)
        arrival = this_arrival()
        ends_at = arrival.deadline(self.request_timeout)
        self._take(arrival, params.n, 0)
        try:
            stream = await self.backend.generate(prompt, params, request_id, **options)
            try:
                self._take(arrival, 0, stream.tokens)
            except RequestError:
                await stream.aclose()
                raise
        except BaseException:
            self.capacity.give_back(params.n, 0, worked=False)
            raise
        admitted = AdmittedStream(self, stream, params.n, ends_at)
        self._admitted.add(admitted)
        return admitted

    def _take(self, arrival: Arrival, sequences: int, tokens: int) -> None:
        """Take places, or raise RequestError. What `arrival` has asked for so far counts, too: if that will
        never fit, its client is told so, and not to come again.
        """
        arrival.sequences += sequences
        arrival.tokens += tokens
        if self.capacity.fits(sequences, tokens):
            self.capacity.take(sequences, tokens)
        elif self.capacity.could_ever_fit(arrival.sequences, arrival.tokens):
            raise self.refusal("queue_full", sequences, tokens)
        else:
            raise self.refusal("request_too_large", arrival.sequences, arrival.tokens)

    def give_back(self, admitted: AdmittedStream, sequences: int) -> None:
        self._admitted.discard(admitted)
        self.capacity.give_back(sequences, admitted.tokens, worked=admitted.has_begun)

    def begin_shutdown(self, seconds: float) -> None:
        """Refuse every new request from now on. Admitted ones go on; the server ends in `seconds`."""
        self._closes_at = asyncio.get_running_loop().time() + seconds

    def end_all(self) -> None:
        """End every request with the tokens it has, those too that are just being checked."""
        self.has_ended_all = True
        for admitted in list(self._admitted):
            admitted.end("shutting_down")

    def _trouble(self) -> str | None:
        """The code of why no request can be served; None if requests can."""
        if self._closes_at is not None:
            return "shutting_down"
        if not self.backend.health():
            return "engine_down"
        return "engine_stuck" if self.watch and self.watch.is_stuck() else None

    def refusal(self, code: str, sequences: int = 0, tokens: int = 0) -> RequestError:
        """`_error`, and one more refusal in the count."""
        self.refused[code] += 1
        return self._error(code, sequences, tokens)

    def _error(self, code: str, sequences: int = 0, tokens: int = 0) -> RequestError:
        """The refusal with this code. `sequences`, `tokens`: what there was no room for."""
        limits = self.capacity.limits
        match code:
            case "queue_full" | "queue_timeout":
                if code == "queue_full":
                    status, why = 429, f"the queue is full: {self.capacity.sequences} sequences are in it"
                else:
                    status = 503
                    why = "this request's time was over before its first token: the queue is long"
                # Rounded down: a client that comes too late leaves a seat empty.
                seconds = max(1, math.floor(self.capacity.retry_after(sequences, tokens)))
                message = f"{why}; try again in {seconds} s"
                return RequestError(status, message, code=code, retry_after=seconds)
            case "request_too_large":
                if sequences > limits.max_num_queued_reqs:
                    size, limit, param = f"{sequences} sequences", limits.max_num_queued_reqs, "n"
                else:
                    size = f"{tokens} tokens with its answers"
                    limit, param = limits.max_num_queued_tokens, "max_tokens"
                message = f"this request comes to {size}: the whole queue has room for {limit}"
                return RequestError(400, message, param, code)
            case "shutting_down":
                seconds_left = max(0.0, (self._closes_at or 0.0) - asyncio.get_running_loop().time())
                headers = {"Connection": "close"}
                message = "the server is shutting down"
                return RequestError(503, message, None, code, math.ceil(seconds_left), headers)
            case "engine_stuck":
                assert self.watch is not None  # `_trouble` asked it
                silent = round(self.watch.silent_seconds())
                message = f"the engine has been silent for {silent} s: its last step has not come back"
                return RequestError(503, message, code=code)
        return RequestError(503, "the engine has ended", code="engine_down")
