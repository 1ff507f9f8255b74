"""The page /engine, which shows the engine at work, and the stream of snapshots that it draws. Part 12.

The page's files are open, as the dashboard's are. The stream, /engine/events, needs the API key if the server
has one. It sends a snapshot (engine/telemetry/live_view.py) as a server-sent event, again and again. All who
watch get the same snapshots, so the engine makes as many for eight as for one:

- at most FRAMES_PER_SECOND, and fewer if they are large: to make them takes at most TIME_SHARE of the time;
- none while nobody watches. A watcher who reads slowly misses some, and gets the newest once there is room.

The stream ends with an error, as an event, when the server shuts down, or when the engine has ended or hangs.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from fastapi import FastAPI

from engine.core.engine_thread import EngineThread
from engine.core.mailbox import EngineError
from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.server.complete import refuse_if_down
from engine.server.errors import RequestError, as_request_error
from engine.server.limits import MAX_WATCHERS
from engine.server.responses import ResponseFields, openapi_responses
from engine.server.sse import EventStream, event
from engine.server.telemetry_routes import PAGES, page
from engine.telemetry.live_view import EngineSnapshot, LiveView

DRAWINGS = ("play.css", "play_svg.js", "play_blocks.js", "play_steps.js")  # of the articles' figures
SHARED = ("dashboard.css", "stream.js")  # with other pages
NAMES = ("engine.css", "engine.js", "engine_memory.js", *SHARED, *DRAWINGS)
FILES = {"/engine": PAGES / "engine.html"} | {f"/engine/{name}": PAGES / name for name in NAMES}
OPEN_PATHS = frozenset(FILES)
EVENTS_PATH = "/engine/events"
FRAMES_PER_SECOND = 5
TIME_SHARE = 0.01  # of one processor's time, for snapshots
STEP_SECONDS = 5  # how long a snapshot waits for the step under way
RETRY_SECONDS = 5  # after which a watcher who was refused may ask again


class SnapshotEvent(ResponseFields):
    """One event of the stream: a snapshot of the engine, as `EngineSnapshot.read` makes it."""

    time: float  # seconds since the view was made
    model: str
    running: int  # requests
    waiting: int  # requests
    seats: int | None  # the most requests that may run at once
    budget: int | None  # the most tokens that a step may have now
    memory: dict  # the fields of `MemoryCopy`
    requests: list[dict]  # those that run, then those that wait
    steps: list[dict]  # oldest first
    events: list[dict]  # blocks that were copied and requests that were preempted, oldest first


class Frames:
    """The newest snapshot of one engine, as an event, for all who watch."""

    def __init__(self, view: LiveView, engine: EngineThread) -> None:
        """`view` listens to the engine that runs in `engine`."""
        self.number = 0  # of the newest frame, from 1
        self.num_watchers = 0
        self._view, self._engine = view, engine
        self._lock = asyncio.Lock()  # held by the watcher who makes the next frame
        self._frame = ""  # the newest one
        self._next_at = 0.0  # by the monotonic clock: no frame is made before

    async def after(self, number: int) -> str:
        """The newest frame, if its number is above `number`; otherwise the next, once it is time for it.

        Raises EngineError if the engine has ended, and TimeoutError if its step takes over STEP_SECONDS.
        """
        async with self._lock:
            if self.number <= number:
                await self._make_next()
            return self._frame

    async def _make_next(self) -> None:
        """Make the next frame, once it is time for it. Raises as `after` does."""
        await asyncio.sleep(self._next_at - time.monotonic())
        async with asyncio.timeout(STEP_SECONDS):
            snapshot = await self._engine.between_steps(self._view.snapshot)
        self._frame, encode_seconds = await asyncio.to_thread(encode, snapshot)
        self.number += 1

        pause = max(1 / FRAMES_PER_SECOND, (snapshot.copy_seconds + encode_seconds) / TIME_SHARE)
        self._next_at = time.monotonic() + pause

    def join(self) -> None:
        """Count a watcher, until `leave` is called. Raises RequestError 429 for more than MAX_WATCHERS."""
        if self.num_watchers >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} watch the engine already"
            raise RequestError(429, message, code="too_many_watchers", retry_after=RETRY_SECONDS)
        self.num_watchers += 1

    def leave(self) -> None:
        """Stop counting a watcher, once for each `join`."""
        self.num_watchers -= 1

    async def events(self, backend: Backend) -> AsyncGenerator[str, None]:
        """The frames that come from now on, for one watcher, until the engine or the server ends. The last
        event is then an error.
        """
        number = self.number
        try:
            while True:
                refuse_if_down(backend)
                frame = await self.after(number)
                number = self.number  # that of `frame`
                yield frame
        except EngineError as error:
            yield event(RequestError(503, str(error), code="engine_down").body())
        except TimeoutError:
            message = f"the engine's step takes more than {STEP_SECONDS} s"
            yield event(RequestError(503, message, code="engine_busy").body())
        except Exception as error:
            yield event(as_request_error(error).body())


def encode(snapshot: EngineSnapshot) -> tuple[str, float]:
    """The snapshot as an event, and the seconds of processor time that this took."""
    start = time.thread_time()
    frame = event(snapshot.read())
    return frame, time.thread_time() - start


def live_routes(view: LiveView, engine: EngineThread) -> AppExtension:
    """An extension of `create_app` that shows `view`, whose engine runs in `engine`. Pass OPEN_PATHS to
    `create_app` as `open_paths`.
    """
    frames = Frames(view, engine)

    def extend(app: FastAPI, backend: Backend) -> None:
        @app.get(
            EVENTS_PATH,
            summary=f"The engine at work, up to {FRAMES_PER_SECOND} times a second: memory, requests, steps",
            status_code=200,
            response_class=EventStream,
            responses=openapi_responses(None, SnapshotEvent),
        )
        async def events() -> EventStream:
            refuse_if_down(backend)
            frames.join()
            on_end = AsyncExitStack()  # the stream closes it
            on_end.callback(frames.leave)
            return EventStream(frames.events(backend), on_end)

        for path, file in FILES.items():
            app.get(path, include_in_schema=False)(page(file))

    return extend
