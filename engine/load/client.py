"""One request to any OpenAI-compatible server, as a stream, with a stopwatch. Part 15.

Promises a record of every request, whatever becomes of it: answered, refused, broken off, too late. Times are
by the event loop's clock, which a test can set. No request is sent twice: a refusal is counted.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from engine.client.untrusted import ByteLimit, parse_json, token_count
from engine.load.plan import Job

OK, TIMEOUT, UNREACHABLE, BROKEN, ERROR_EVENT, GARBLED = (
    "ok", "timeout", "no connection", "broken off", "error event", "no OpenAI stream",
)  # fmt: skip
PATHS = {"completions": "completions", "chat": "chat/completions"}


@dataclass
class RequestRecord:
    """What a client saw of one request. Moments are seconds of the event loop's clock."""

    due: float  # when it was to be sent
    sent: float  # when it was sent
    outcome: str = BROKEN  # OK, an HTTP status as digits, or one of the names above
    first: float | None = None  # when the first piece of text came
    last: float | None = None  # when the last piece of text came
    end: float = 0.0  # when the answer was over
    prompt_tokens: int | None = None  # by the server's usage; None: it did not say
    tokens: int | None = None  # of the output, by the server's usage
    retry_after: float | None = None  # seconds, of a refusal that has the header
    text: str = ""
    gaps: list[float] = field(default_factory=list)  # seconds from each piece of text to the next

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def late(self) -> float:
        """Seconds by which the load generator sent it too late."""
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text, from when the request was due: waiting in the generator counts, too. The
        end stands for the first text of an answer without any. None without a whole answer.
        """
        if not self.ok:
            return None
        return (self.end if self.first is None else self.first) - self.due

    @property
    def e2e(self) -> float | None:
        """Seconds to the last text, from when the request was due. None without a whole answer."""
        if not self.ok:
            return None
        return (self.end if self.last is None else self.last) - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds from one token to the next; None for a single token, without usage, or without a whole
        answer.
        """
        if not self.ok or self.first is None or self.last is None:
            return None
        if self.tokens is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass
class Endpoint:
    """A server, and how it is asked."""

    http: httpx.AsyncClient  # its base_url ends with /v1
    model: str
    api: str = "completions"  # or chat
    timeout: float = 600.0  # seconds for a whole answer
    fields: dict | None = None  # further fields of each body

    def body(self, job: Job) -> dict:
        """The request's JSON: a stream, with the server's count of tokens in its last event."""
        body: dict = {"model": self.model, "max_tokens": job.max_tokens}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | (self.fields or {})

    async def ask(self, job: Job, due: float) -> RequestRecord:
        """Send one request now, which was due at `due`, and read its answer to the end."""
        clock = asyncio.get_running_loop().time
        record = RequestRecord(due, sent=clock())
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.http.stream("POST", PATHS[self.api], json=self.body(job)) as response,
            ):
                if response.status_code == 200:
                    await _read(response.aiter_bytes(), record)
                else:
                    record.outcome = str(response.status_code)
                    record.retry_after = _seconds(response.headers.get("retry-after"))
        except TimeoutError:
            record.outcome = TIMEOUT
        except (httpx.ConnectError, httpx.ConnectTimeout):
            record.outcome = UNREACHABLE
        except httpx.HTTPError:
            record.outcome = BROKEN
        except (ValueError, LookupError, TypeError, AttributeError):  # no JSON, or another shape
            record.outcome = GARBLED
        record.end = clock()
        return record


async def _read(received: AsyncIterator[bytes], record: RequestRecord) -> None:
    """Fill in `record` from a stream. Without [DONE] and a finish_reason, the stream was broken off."""
    clock = asyncio.get_running_loop().time
    pieces: list[str] = []
    has_error = has_done = has_finish_reason = False
    async for data in event_data(received):
        if data == b"[DONE]":
            has_done = True
            continue
        chunk = parse_json(data)
        if "error" in chunk:
            has_error = True
        if usage := chunk.get("usage"):
            record.prompt_tokens = token_count(usage["prompt_tokens"])
            record.tokens = token_count(usage["completion_tokens"])
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason") is not None:
                has_finish_reason = True
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                pieces.append(piece)
                now = clock()
                if record.last is None:
                    record.first = now
                else:
                    record.gaps.append(now - record.last)
                record.last = now
    record.text = "".join(pieces)
    if has_error:
        record.outcome = ERROR_EVENT
    elif has_done and has_finish_reason:
        record.outcome = OK
    else:
        record.outcome = BROKEN


async def event_data(received: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event: what follows `data:` on a line. Lines end with \\n and with nothing else: a
    text may hold other characters at which `splitlines` would cut.
    """
    limit = ByteLimit()
    unfinished: list[bytes] = []  # the pieces of the line whose end has not come
    async for piece in received:
        *lines, rest = limit.take(piece).split(b"\n")
        if lines:
            lines[0] = b"".join([*unfinished, lines[0]])
            unfinished = []
        unfinished.append(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _seconds(value: str | None) -> float | None:
    """A Retry-After header in seconds; None: there is none, or it is no number of seconds from 0 on."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:  # HTTP also allows a date, which servers of this API do not send
        return None
    return seconds if 0 <= seconds < math.inf else None
