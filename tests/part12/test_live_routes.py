"""/engine and its stream, over HTTP: who may watch, how many, what they share, and what they leave behind."""

import asyncio
import json
import re
import threading
import time
from contextlib import ExitStack

import pytest

from engine.core.engine_thread import EngineThread
from engine.core.mailbox import EngineError
from engine.decoding.params import SamplingParams
from engine.server.app import create_app
from engine.server.errors import RequestError
from engine.server.limits import MAX_WATCHERS
from engine.server.live_routes import (
    EVENTS_PATH,
    FILES,
    OPEN_PATHS,
    TIME_SHARE,
    Frames,
    SnapshotEvent,
    live_routes,
)
from engine.telemetry.live_view import LiveView
from tests.part04.serving import DEADLINE, http, serve, wait_until
from tests.part06.fakes import held
from tests.part12.pages import fake_engine, paged


class Counted(LiveView):
    """A view that counts its snapshots, which say that they `take` so many seconds."""

    num_snapshots, take = 0, None

    def snapshot(self):
        self.num_snapshots += 1
        made = super().snapshot()
        if self.take is not None:
            object.__setattr__(made, "copy_seconds", self.take)
        return made


class Served:
    """A server whose engine is watched."""

    def __init__(self, stack: ExitStack, **settings) -> None:
        self.thread = EngineThread(fake_engine(paged(64)), "fake")
        self.view = Counted(self.thread.engine, "fake")
        extend, self.frames = live_routes(self.view, self.thread), None
        self.app = create_app(self.thread, [extend], open_paths=OPEN_PATHS, **settings)
        self.url = stack.enter_context(serve(self.app))

    def client(self):
        return http(self.url)


@pytest.fixture
def server():
    """server(**settings of create_app) -> what `Served` has."""
    with ExitStack() as stack:
        yield lambda **settings: Served(stack, **settings)


def frames_of(answer):
    """The data of each event of a stream."""
    return (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)


def test_the_stream_shows_what_is_served(server):
    client = server().client()
    with client, client.stream("GET", EVENTS_PATH) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = frames_of(answer)
        first = next(frames)
        assert first["steps"] == []
        assert SnapshotEvent.model_validate(first, strict=True).model_dump() == first, "as it is described"
        body = {"model": "fake", "prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        steps = next(frame["steps"] for frame in frames if len(frame["steps"]) == 5)
    assert [(step["prompt"], step["output"]) for step in steps] == [(5, 0), *[(0, 1)] * 4]


def test_the_page_is_open_and_its_stream_needs_the_key(server):
    client = server(api_key="secret").client()
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200, path
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = client.get(EVENTS_PATH, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    with client.stream("GET", EVENTS_PATH, headers={"Authorization": "Bearer secret"}) as answer:
        assert answer.status_code == 200


def test_so_many_may_watch_and_who_leaves_makes_room(server):
    served = server()
    with ExitStack() as stack:
        clients = [stack.enter_context(served.client()) for _ in range(MAX_WATCHERS)]
        streams = [stack.enter_context(client.stream("GET", EVENTS_PATH)) for client in clients]
        assert [answer.status_code for answer in streams] == [200] * MAX_WATCHERS
        client = stack.enter_context(served.client())
        answer = client.get(EVENTS_PATH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_watchers")
        assert int(answer.headers["retry-after"]) >= 1
        streams[0].close()

        def is_let_in() -> bool:
            with client.stream("GET", EVENTS_PATH) as answer:
                return answer.status_code == 200

        wait_until(is_let_in)


def test_a_head_of_the_stream_watches_nothing(server):
    served = server()
    client = served.client()
    for _ in range(2 * MAX_WATCHERS):
        answer = client.head(EVENTS_PATH)
        assert (answer.status_code, answer.content) == (200, b"")
    with client.stream("GET", EVENTS_PATH) as answer:
        assert answer.status_code == 200, "none of them is left"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_stream_accepts_no_other_method(server, method):
    assert server().client().request(method, EVENTS_PATH).status_code == 405


def test_the_page_may_talk_to_its_own_server_alone_and_carries_no_inline_code(server):
    client = server().client()
    for path, file in FILES.items():
        answer = client.get(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.", text), f"{file.name} names another host"
    page = FILES["/engine"].read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|<style|\sstyle=", page)
    code = "".join(file.read_text() for file in FILES.values())
    imports = re.findall(r'from "\./(\w+\.js)"', code)
    assert set(imports) <= {file.name for file in FILES.values()}, "what a module imports is served beside it"


# --- frames -------------------------------------------------------------------------------------------


def in_a_loop(scene) -> None:
    """Run scene(frames, view, thread) in an event loop, with an engine that runs in its thread."""

    async def play() -> None:
        async with asyncio.timeout(DEADLINE), EngineThread(fake_engine(paged(64)), "fake") as thread:
            view = Counted(thread.engine, "fake")
            await scene(Frames(view, thread), view, thread)

    asyncio.run(play())


def test_all_who_watch_get_the_same_frames():
    async def scene(frames, view, thread):
        crowd = [frames.events(thread) for _ in range(MAX_WATCHERS)]
        for number in range(1, 4):
            seen = await asyncio.gather(*map(anext, crowd))
            assert len(set(seen)) == 1
            assert view.num_snapshots == number, "one snapshot serves all"

    in_a_loop(scene)


def test_who_reads_slowly_misses_frames_and_gets_the_newest():
    async def scene(frames, view, thread):
        slow, quick = frames.events(thread), frames.events(thread)
        first = await asyncio.gather(anext(slow), anext(quick))
        assert first[0] == first[1]
        for _ in range(3):
            newest = await anext(quick)
        assert await anext(slow) == newest
        assert view.num_snapshots == 4

    in_a_loop(scene)


def test_nobody_watches_and_no_snapshot_is_made():
    async def scene(frames, view, thread):
        watcher = frames.events(thread)
        await anext(watcher)
        await watcher.aclose()
        before = view.num_snapshots
        async for _ in await thread.generate("hello", SamplingParams(temperature=0, max_tokens=50), "a"):
            pass
        assert view.num_snapshots == before
        fresh = json.loads((await anext(frames.events(thread))).removeprefix("data: "))
        assert fresh["time"] > 0
        assert view.num_snapshots == before + 1, "who comes later gets no old frame"

    in_a_loop(scene)


def test_large_snapshots_come_less_often():
    """One that takes ten seconds is followed by a pause in which it is a small share of the time."""

    async def scene(frames, view, thread):
        view.take = 10.0
        await anext(frames.events(thread))
        pause = frames._next_at - time.monotonic()
        assert pause > 0.9 * 10 / TIME_SHARE

    in_a_loop(scene)


def test_who_leaves_while_a_frame_is_made_leaves_it_to_the_next():
    async def scene(frames, view, thread):
        await anext(frames.events(thread))
        leaver = asyncio.create_task(anext(frames.events(thread)))
        stayer = asyncio.create_task(anext(frames.events(thread)))
        await asyncio.sleep(0)  # both wait, one of them for the lock
        leaver.cancel()
        assert "memory" in await stayer
        assert leaver.cancelled()

    in_a_loop(scene)


def test_a_step_that_takes_too_long_ends_the_stream_in_words(monkeypatch):
    monkeypatch.setattr("engine.server.live_routes.STEP_SECONDS", 0.01)

    async def scene(frames, view, thread):
        with held(thread):
            events = [json.loads(line.removeprefix("data: ")) async for line in frames.events(thread)]
        assert [event["error"]["code"] for event in events] == ["engine_busy"]
        monkeypatch.setattr("engine.server.live_routes.STEP_SECONDS", DEADLINE)
        assert "memory" in await anext(frames.events(thread)), "and the engine goes on"

    in_a_loop(scene)


def test_the_end_of_the_engine_ends_the_stream_in_words():
    async def scene(frames, view, thread):
        watcher = frames.events(thread)
        await anext(watcher)
        await asyncio.to_thread(thread.stop)
        (event,) = [json.loads(line.removeprefix("data: ")) async for line in watcher]
        assert event["error"]["code"] == "engine_down"
        with pytest.raises(EngineError):
            await frames.after(frames.number)

    in_a_loop(scene)


def test_a_server_that_shuts_down_says_so():
    class Closing:
        def health(self):
            raise RequestError(503, "the server is shutting down", code="shutting_down")

    async def scene(frames, view, thread):
        (event,) = [json.loads(line.removeprefix("data: ")) async for line in frames.events(Closing())]
        assert event["error"]["code"] == "shutting_down"

    in_a_loop(scene)


def test_a_stream_is_no_answer_to_wait_for_once_the_engine_has_ended(server):
    served = server()
    client = served.client()
    ended = threading.Event()
    served.thread.engine.on_lost.append(lambda _: ended.set())
    served.thread.engine.report_lost(RuntimeError("gone"))
    wait_until(lambda: not served.thread.health())
    answer = client.get(EVENTS_PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
