"""Admission control: a backend around a backend that takes on no more than it can serve. Part 15.

Promises that what is admitted stays within `QueueLimits`; that a request is admitted with all its samples or
not at all; that each ends by its deadline; and that its places come back the moment it has ended, failed or
been left, whoever was reading. Knows no engine: any `Backend` will do.

Who is not served is told so at once, in OpenAI's shape, with a `code` that says why:

| status | code | when | Retry-After |
|---|---|---|---|
| 429 | queue_full | there is no room for all of it now | yes: at the pace of late (`Room`) |
| 400 | request_too_large | it is more than the whole queue: there will never be room | no |
| 503 | queue_timeout | its deadline came before its first token | yes |
| 503 | shutting_down | the server ends; `Connection: close` | yes: when it will be gone |
| 503 | engine_stuck | the engine has work, and has been silent for STUCK_SECONDS | no: nobody knows |
| 503 | engine_down | the engine has ended | no |

A request that finds MAX_REQUESTS under way does not come so far: 503, server_full (gates.py).

429 says: you, and everybody, are asking for too much at once. 503 says: this server cannot, whoever asks. A
stream that has begun cannot change its status: it gets the same body as an error event. Who has a token when
the deadline comes, or the shutdown's, keeps what is there: finish_reason "abort", with status 200.
"""

import asyncio
import math
from dataclasses import replace
from typing import Self

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream
from engine.server.deadline import Arrival, this_arrival
from engine.server.errors import RequestError
from engine.server.room import Room
from engine.server.watch import StepWatch

REFUSED = ("queue_full", "request_too_large", "queue_timeout", "shutting_down", "engine_stuck", "engine_down")
CUT_SHORT = ("queue_timeout", "shutting_down")  # why a running request had to end


class Admitted:
    """The stream of a request that was admitted: it holds its places until it is over."""

    def __init__(self, admission: "Admission", stream: OutputStream, sequences: int, ends_at: float) -> None:
        """`ends_at`: its deadline, by the event loop's clock."""
        self.tokens = stream.tokens
        self._admission, self._stream, self._sequences = admission, stream, sequences
        self._ends_at, self._why = ends_at, "queue_timeout"
        self._reading: asyncio.Timeout | None = None
        self._latest: RequestOutput | None = None
        self.begun = self._over = False
        if admission.all_end:
            self.end("shutting_down")

    def end(self, why: str) -> None:
        """It must be over now."""
        self._ends_at, self._why = -math.inf, why
        if self._reading:
            self._reading.reschedule(self._ends_at)

    def __aiter__(self) -> Self:
        self.begun = True  # as in the engine: nobody works for who is never read
        return self

    async def __anext__(self) -> RequestOutput:
        """The stream's next output, if it is there before `_ends_at`; else, once that has come, `_cut_short`.

        Waiting must itself end at that time, also when `end` changes it meanwhile: `_reading` is the
        `asyncio.timeout_at` around it, and None while nobody waits. A finished output closes this at once,
        and so does an error: who reads slowly keeps nobody out. What is over gives nothing more.
        """
        if self._over:
            raise StopAsyncIteration
        if asyncio.get_running_loop().time() >= self._ends_at:
            return await self._cut_short()
        waiting = asyncio.timeout_at(None if self._ends_at == math.inf else self._ends_at)
        try:
            async with waiting as self._reading:
                self._latest = await anext(self._stream)
        except BaseException as error:
            if isinstance(error, TimeoutError) and waiting.expired():
                return await self._cut_short()
            await self.aclose()
            raise
        finally:
            self._reading = None
        if self._latest.finished:
            await self.aclose()
        return self._latest

    async def _cut_short(self) -> RequestOutput:
        """What there is, as a last output: what runs still ends with "abort". RequestError: no token yet."""
        await self.aclose()
        latest = self._latest
        if latest is None or not any(sample.token_ids for sample in latest.outputs):
            raise self._admission.refusal(self._why)
        self._admission.cut_short[self._why] += 1
        samples = [replace(one, finish_reason=one.finish_reason or "abort") for one in latest.outputs]
        return replace(latest, outputs=samples, finished=True)

    async def aclose(self) -> None:
        """Give the places back, and abort what is unfinished. Twice is fine."""
        if not self._over:
            self._over = True
            self._admission.give_back(self, self._sequences)
            await self._stream.aclose()


class Admission:
    """Takes on what there is room for, and turns the rest away."""

    def __init__(
        self,
        backend: Backend,
        room: Room,
        request_timeout: float | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """`request_timeout`: seconds for a request, from its arrival; None: as long as it takes. `watch`
        notices an engine that hangs. Raises ValueError.
        """
        if request_timeout is not None and not request_timeout > 0:
            raise ValueError(f"request_timeout={request_timeout}: a number of seconds above 0 is accepted")
        self.backend, self.room, self.request_timeout, self.watch = backend, room, request_timeout, watch
        self.supports = backend.supports
        self.refused, self.cut_short = dict.fromkeys(REFUSED, 0), dict.fromkeys(CUT_SHORT, 0)
        self._admitted: set[Admitted] = set()
        self._gone_at: float | None = None  # when the server will have ended, once it is to end
        self.all_end = False  # whoever is here, or was being looked at, ends with what they have

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
        """Whether nothing is admitted, nor being looked at."""
        return not self.room.sequences

    async def abort(self, request_id: str) -> None:
        await self.backend.abort(request_id)

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str, **options) -> Admitted:
        """Check a request and admit it, or raise: RequestError by the table above, or what the backend says.

        1. Can anybody be served (`_trouble`)? By when must it be over?
        2. Its n sequences `_take` their places first: while its prompt becomes tokens, others come.
        3. The backend checks it, and says how many tokens it may come to (`stream.tokens`).
        4. These take their places, too, or the stream is closed. Whatever goes wrong, also if this is
           cancelled, all places are given back; nobody worked for them, so they tell of no pace.
        """
        if why := self._trouble():
            raise self.refusal(why)
        asking = this_arrival()
        ends_at = asking.deadline(self.request_timeout)
        self._take(asking, params.n, 0)
        try:
            stream = await self.backend.generate(prompt, params, request_id, **options)
            try:
                self._take(asking, 0, stream.tokens)
            except RequestError:
                await stream.aclose()
                raise
        except BaseException:
            self.room.give_back(params.n, 0, worked=False)
            raise
        admitted = Admitted(self, stream, params.n, ends_at)
        self._admitted.add(admitted)
        return admitted

    def _take(self, asking: Arrival, sequences: int, tokens: int) -> None:
        """Take places, or raise RequestError. What `asking` has asked for so far counts, too: if that will
        never fit, its client is told so, and not to come again.
        """
        asking.sequences += sequences
        asking.tokens += tokens
        if self.room.fits(sequences, tokens):
            self.room.take(sequences, tokens)
        elif self.room.could_ever_fit(asking.sequences, asking.tokens):
            raise self.refusal("queue_full", sequences, tokens)
        else:
            raise self.refusal("request_too_large", asking.sequences, asking.tokens)

    def give_back(self, admitted: Admitted, sequences: int) -> None:
        self._admitted.discard(admitted)
        self.room.give_back(sequences, admitted.tokens, worked=admitted.begun)

    def begin_shutdown(self, seconds: float) -> None:
        """From now on, whoever comes is refused. Who was admitted may go on; the server says until when."""
        self._gone_at = asyncio.get_running_loop().time() + seconds

    def end_all(self) -> None:
        """Whoever is still here ends with what they have, and so does who was just being looked at."""
        self.all_end = True
        for admitted in list(self._admitted):
            admitted.end("shutting_down")

    def _trouble(self) -> str | None:
        """Why nobody can be served, as a code; None: they can."""
        if self._gone_at is not None:
            return "shutting_down"
        if not self.backend.health():
            return "engine_down"
        return "engine_stuck" if self.watch and self.watch.is_stuck() else None

    def refusal(self, code: str, sequences: int = 0, tokens: int = 0) -> RequestError:
        """One more request that is not served, and what its client is told."""
        self.refused[code] += 1
        return self._error(code, sequences, tokens)

    def _error(self, code: str, sequences: int = 0, tokens: int = 0) -> RequestError:
        """`sequences`, `tokens`: what there was no room for."""
        room, limits = self.room, self.room.limits
        match code:
            case "queue_full" | "queue_timeout":
                seconds = max(1, math.ceil(room.seconds_until_room(sequences, tokens)))
                late = "this request's time was over before its first token: the queue is long"
                full = f"the queue is full: {room.sequences} sequences are in it"
                status, why = (429, full) if code == "queue_full" else (503, late)
                return RequestError(status, f"{why}; try again in {seconds} s", None, code, seconds)
            case "request_too_large":
                many = sequences > limits.max_num_queued_reqs
                asked, most, param = (
                    (f"{sequences} sequences", limits.max_num_queued_reqs, "n")
                    if many
                    else (f"{tokens} tokens with its answers", limits.max_num_queued_tokens, "max_tokens")
                )
                message = f"this request comes to {asked}: the whole queue has room for {most}"
                return RequestError(400, message, param, code)
            case "shutting_down":
                left = max(0.0, (self._gone_at or 0.0) - asyncio.get_running_loop().time())
                headers = {"Connection": "close"}
                return RequestError(503, "the server is shutting down", None, code, math.ceil(left), headers)
            case "engine_stuck":
                silent = round(self.watch.silent_seconds())
                message = f"the engine has been silent for {silent} s: its last step has not come back"
                return RequestError(503, message, code=code)
        return RequestError(503, "the engine has ended", code="engine_down")
