"""An event loop whose clock jumps to the next appointment, and a server in it that says what a test wants.

Hours pass in no time, and a time that is measured is exactly the time that was written into the script.
"""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

import httpx


class _Clock(selectors.DefaultSelector):
    """Waits for nothing: what would be waited is added to the clock."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.now += max(0.0, timeout)
        return ready


class Instant(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def compute(self, seconds: float) -> None:
        """Let time pass in which nobody else has a turn."""
        self.clock.now += seconds


def run(work: Coroutine):
    """What `work` gives, in a loop of its own that begins at 0 seconds."""
    with asyncio.Runner(loop_factory=Instant) as runner:
        return runner.run(work)


class Script(httpx.AsyncBaseTransport):
    """A server. `tell(i, body)` gives the response to the i-th request that reaches it."""

    def __init__(self, tell: Callable[[int, dict], Awaitable[httpx.Response]]) -> None:
        self.tell = tell
        self.asked: list[tuple[float, dict, httpx.Headers]] = []  # when, body, headers
        self.under_way = self.most_under_way = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "script"}]})
        now = asyncio.get_running_loop().time()
        self.asked.append((now, json.loads(request.content), request.headers))
        return await self.tell(len(self.asked) - 1, self.asked[-1][1])


def event(data: dict | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def words(
    waits: Sequence[float], chat: bool = False, usage: bool = True, done: bool = True
) -> httpx.Response:
    """A stream of one word per wait, in seconds; then usage, as OpenAI's servers send it."""

    async def body() -> AsyncIterator[bytes]:
        if chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i, wait in enumerate(waits):
            await asyncio.sleep(wait)
            reason = "length" if i == len(waits) - 1 else None
            said = {"delta": {"content": " w"}} if chat else {"text": " w"}
            yield event({"choices": [said | {"finish_reason": reason}]})
        if usage:
            yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(waits)}})
        if done:
            yield event("[DONE]")

    return httpx.Response(200, content=body())
