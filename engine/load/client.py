"""Sends one request to any OpenAI-compatible server, and times its streamed answer. Part 15.

Every request gets a record: whether it was answered, refused, broken off or too late. Times are read from the
event loop's clock, which a test can replace. No request is sent twice: a refusal is recorded, not retried.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from engine.client.untrusted import ByteLimit, parse_json, token_count
from engine.load.plan import Job

# What may become of a request; an HTTP status as digits is a refusal.
OK = "ok"
TIMEOUT = "timeout"
UNREACHABLE = "no connection"
BROKEN = "broken off"
CUT_SHORT = "cut short"  # the server says so: finish_reason "abort", such as at the request's deadline
ERROR_EVENT = "error event"
GARBLED = "no OpenAI stream"
PATHS = {"completions": "completions", "chat": "chat/completions"}  # where OpenAI's API has them, behind /v1


class GarbledStream(ValueError):
    """An answer is no stream of OpenAI's events, or is longer than MAX_ANSWER_BYTES."""


@dataclass
class RequestRecord:
    """What a client saw of one request. Points in time are in seconds of the event loop's clock."""

    due: float  # when the request should be sent
    sent: float  # when the request was sent
    outcome: str = BROKEN  # an HTTP status as digits, or one of the names above
    first: float | None = None  # when the first piece of text came; None without text
    last: float | None = None  # when the last piece of text came; None without text
    end: float = 0.0  # when the answer ended
    prompt_tokens: int | None = None  # from the answer's usage; None without usage
    tokens: int | None = None  # output tokens, from the answer's usage; None without usage
    retry_after: float | None = None  # seconds, from the headers of a refusal; None if they do not say
    text: str = ""  # also "" if an error ended the reading, whatever came before
    gaps: list[float] = field(default_factory=list)  # seconds from each piece of text to the next

    def note_text(self, now: float) -> None:
        """Note that a piece of text has come at the time `now`."""
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    @property
    def ok(self) -> bool:
        """Whether the answer came whole."""
        return self.outcome == OK

    @property
    def refused(self) -> bool:
        """Whether the server answered with an HTTP status other than 200."""
        return self.outcome.isdigit()

    @property
    def late(self) -> float:
        """Seconds by which the load generator sent the request too late."""
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from `due` to the first text, so that waiting in the generator counts,
        too. For an answer without text, seconds to its end. None if the answer is not whole.
        """
        if not self.ok:
            return None
        return (self.end if self.first is None else self.first) - self.due

    @property
    def e2e(self) -> float | None:
        """End-to-end latency: seconds from `due` to the last text, or to the end of an answer without text.
        None if the answer is not whole.
        """
        if not self.ok:
            return None
        return (self.end if self.last is None else self.last) - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds from one token to the next. None for a single token, without
        usage, and if the answer is not whole.
        """
        if not self.ok or self.first is None or self.last is None:
            return None
        if self.tokens is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Endpoint:
    """A server, and the fields that all requests to it share."""

    http: httpx.AsyncClient  # its base_url ends with /v1
    model: str
    api: str = "completions"  # a key of PATHS
    timeout: float = 600.0  # seconds for a whole answer
    fields: dict | None = None  # further fields of each request
    url: str | None = None  # where requests are sent; None: where OpenAI's API has `api`

    def body(self, job: Job) -> dict:
        """The request as JSON. It asks for a stream whose last event has the server's token counts."""
        body: dict = {"model": self.model, "max_tokens": job.max_tokens}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | (self.fields or {})

    async def ask(self, job: Job, due: float) -> RequestRecord:
        """Send one request now, and read its answer to the end. `due` is when the request should have been
        sent, by the event loop's clock. Errors of the network or of the answer do not raise: they are the
        record's `outcome`.
        """
        clock = asyncio.get_running_loop().time
        record = RequestRecord(due, sent=clock())
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.http.stream("POST", self.url or PATHS[self.api], json=self.body(job)) as response,
            ):
                if response.status_code == 200:
                    await _read(response.aiter_bytes(), record)
                else:
                    record.outcome = str(response.status_code)
                    record.retry_after = _retry_after(response.headers)
        except TimeoutError:
            record.outcome = TIMEOUT
        except (httpx.ConnectError, httpx.ConnectTimeout):
            record.outcome = UNREACHABLE
        except httpx.HTTPError:
            record.outcome = BROKEN
        except GarbledStream:
            record.outcome = GARBLED
        record.end = clock()
        return record


async def _read(received: AsyncIterator[bytes], record: RequestRecord) -> None:
    """Fill in `record` from a stream of events. A stream without [DONE], or without a finish_reason, counts
    as broken off; one with the finish_reason "abort" as cut short. Raises GarbledStream.
    """
    clock = asyncio.get_running_loop().time
    pieces: list[str] = []
    has_error = has_done = False
    finish_reasons: set[str] = set()
    async for data in event_data(received):
        if data == b"[DONE]":
            has_done = True
            continue
        chunk = _parse_chunk(data)
        has_error = has_error or chunk.has_error
        if chunk.prompt_tokens is not None:
            record.prompt_tokens = chunk.prompt_tokens
        if chunk.output_tokens is not None:
            record.tokens = chunk.output_tokens
        finish_reasons |= chunk.finish_reasons
        for piece in chunk.pieces:
            pieces.append(piece)
            record.note_text(clock())
    record.text = "".join(pieces)
    if has_error:
        record.outcome = ERROR_EVENT
    elif not has_done or not finish_reasons:
        record.outcome = BROKEN
    elif "abort" in finish_reasons:
        record.outcome = CUT_SHORT
    else:
        record.outcome = OK


@dataclass
class _Chunk:
    """What an event says."""

    has_error: bool
    prompt_tokens: int | None = None  # None: the event does not say it
    output_tokens: int | None = None  # None: the event does not say it
    finish_reasons: set[str] = field(default_factory=set)
    pieces: list[str] = field(default_factory=list)  # of text, none empty


def _parse_chunk(data: bytes) -> _Chunk:
    """Parse an event's JSON. Raises GarbledStream if it is not JSON, or has not OpenAI's fields."""
    try:
        event = parse_json(data)
        chunk = _Chunk(has_error="error" in event)
        usage = event.get("usage")
        if usage:
            chunk.prompt_tokens = token_count(usage["prompt_tokens"])
            chunk.output_tokens = token_count(usage["completion_tokens"])
        for choice in event.get("choices") or ():
            reason, piece = choice.get("finish_reason"), piece_of(choice)
            if reason is not None:
                chunk.finish_reasons.add(reason)
            if piece:
                chunk.pieces.append(piece)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GarbledStream(str(error)) from error
    return chunk


def piece_of(choice: dict) -> str | None:
    """The piece of text in a choice of a completion's event, or of a chat's. None or "" if it has none.
    Raises TypeError if it is no text.
    """
    if "text" in choice:
        piece = choice["text"]
    else:
        delta = choice.get("delta") or {}
        piece = delta.get("content")
    if not isinstance(piece, str | None):
        raise TypeError(f"a piece of text is {type(piece).__name__}")
    return piece


async def event_data(received: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what follows `data:` on a line, without blanks around it. Each such line counts as one event, as
    OpenAI's servers send them. (Part 14's sse.py reads any server's events, and is not async.)

    Only \\n ends a line, because JSON may contain other characters at which `splitlines` cuts. A last line
    without \\n is dropped. Raises GarbledStream if the answer is longer than MAX_ANSWER_BYTES.
    """
    limit = ByteLimit()
    unfinished = bytearray()  # the bytes so far of the line whose end has not come
    async for piece in received:
        try:
            unfinished += limit.take(piece)
        except ValueError as error:
            raise GarbledStream(str(error)) from None
        if b"\n" not in piece:
            continue
        *lines, unfinished = unfinished.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line).removeprefix(b"data:").strip()


def _retry_after(headers: httpx.Headers) -> float | None:
    """The seconds after which a refused client may come again: from OpenAI's header `retry-after-ms`, which
    the openai client prefers, or from Retry-After. None if neither header is a finite number from 0 on.
    """
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:  # such as a date: HTTP allows dates, but servers of this API do not send them
            continue
        if 0 <= seconds < math.inf:
            return seconds
    return None
