"""One request to any OpenAI-compatible server, as a stream, with a stopwatch. Part 15.

Promises a record of every request, whatever becomes of it: answered, refused, broken off, too late. Times are
the event loop's own, which a test may turn by hand. A request is not tried again: who is refused is counted.
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
class Seen:
    """What a client saw of one request. Moments are seconds of the event loop's clock."""

    due: float  # when it was to be sent
    sent: float  # when it was
    outcome: str = BROKEN  # OK, an HTTP status as digits, or one of the names above
    first: float | None = None  # the first piece of text that was not empty
    last: float | None = None  # the last one
    end: float = 0.0
    prompt_tokens: int | None = None  # by the server's usage; None: it did not say
    tokens: int | None = None
    retry_after: float | None = None  # seconds, of a refusal that said so
    text: str = ""
    gaps: list[float] = field(default_factory=list)  # seconds from each piece of text to the next

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def late(self) -> float:
        """Seconds by which the generator itself was behind its plan."""
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text, from when it was due: waiting in the generator counts, too. An answer
        without any text has it when it ends.
        """
        return (self.end if self.first is None else self.first) - self.due if self.ok else None

    @property
    def e2e(self) -> float | None:
        """Seconds to the last text, from when it was due."""
        return (self.end if self.last is None else self.last) - self.due if self.ok else None

    @property
    def tpot(self) -> float | None:
        """Seconds from one token to the next, on average; None for a single token, or without usage."""
        if not self.ok or self.first is None or self.last is None or not self.tokens or self.tokens < 2:
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
        prompt = (
            {"messages": [{"role": "user", "content": job.prompt}]}
            if self.api == "chat"
            else {"prompt": job.prompt}
        )
        shape = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "max_tokens": job.max_tokens} | prompt | shape | (self.fields or {})

    async def ask(self, job: Job, due: float) -> Seen:
        """Send one request now, which was due at `due`, and read its answer to the end."""
        now = asyncio.get_running_loop().time
        seen = Seen(due, sent=now())
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.http.stream("POST", PATHS[self.api], json=self.body(job)) as response,
            ):
                if response.status_code == 200:
                    await _read(response.aiter_bytes(), seen)
                else:
                    seen.outcome = str(response.status_code)
                    seen.retry_after = _seconds(response.headers.get("retry-after"))
        except TimeoutError:
            seen.outcome = TIMEOUT
        except (httpx.ConnectError, httpx.ConnectTimeout):
            seen.outcome = UNREACHABLE
        except httpx.HTTPError:
            seen.outcome = BROKEN
        except (ValueError, LookupError, TypeError, AttributeError):  # no JSON, or another shape
            seen.outcome = GARBLED
        seen.end = now()
        return seen


async def _read(received: AsyncIterator[bytes], seen: Seen) -> None:
    """Fill in `seen` from a stream. Without [DONE] and a finish_reason, it was broken off."""
    now = asyncio.get_running_loop().time
    pieces, finished, done, failed = [], False, False, False
    async for data in event_data(received):
        if data == b"[DONE]":
            done = True
            continue
        chunk = parse_json(data)
        failed = failed or "error" in chunk
        if usage := chunk.get("usage"):
            seen.prompt_tokens = token_count(usage["prompt_tokens"])
            seen.tokens = token_count(usage["completion_tokens"])
        for choice in chunk.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
                pieces.append(piece)
                before, seen.last = seen.last, now()
                if before is None:
                    seen.first = seen.last
                else:
                    seen.gaps.append(seen.last - before)
    seen.text = "".join(pieces)
    seen.outcome = ERROR_EVENT if failed else OK if done and finished else BROKEN


async def event_data(received: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What stands behind `data:`, line by line. Lines end with \\n here and nowhere else: a text may hold
    other characters that a `splitlines` would take for an end.
    """
    limit = ByteLimit()
    begun: list[bytes] = []  # the line under way
    async for piece in received:
        *lines, rest = limit.take(piece).split(b"\n")
        if lines:
            lines[0], begun = b"".join([*begun, lines[0]]), []
        begun.append(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value) if value is not None else math.nan
    except ValueError:  # a date: nobody here sends one
        return None
    return seconds if 0 <= seconds < math.inf else None
