"""A hundred users at once. Each gets exactly its own text, or a clean refusal; then nothing of them is left.

From outside, at `ruvon serve` in a process of its own: what its users read, and what /proc and /metrics say
it holds. From inside, at the same server in a thread: its tasks, its threads, and the engine's objects.
"""

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import httpx
import pytest

from benchmarks.load_process import Held, at_rest, held, more
from engine import LLM, SamplingParams
from engine.core.engine_thread import EngineThread
from engine.load.client import OK, Endpoint, RequestRecord
from engine.load.plan import Job
from engine.load.run import http_client
from engine.server.app import create_app
from engine.server.telemetry_routes import telemetry_routes
from engine.telemetry.metrics import EngineMetrics
from engine.wiring.compose import build_engine
from engine.wiring.engine_args import EngineArgs
from tests.part04.serving import serve
from tests.system.attack import ENDLESS, Process, wait_until

USERS, LEAVERS, PLACES = 100, 20, 256
DEADLINE = 240.0  # seconds after which what we wait for will never come: not a promise about speed
GROWTH_MB = 40  # of memory over two storms, once a first one has filled what is filled on first use
WHO = (
    "a dog",
    "Tom",
    "the moon",
    "a tiny 🦊",
    "Lily",
    "her mom",
    "a red boat",
    "two birds",
    "rain",
    "my cat",
)
HOW = (
    "Once upon a time {}", "{} was very sad because", "One day, {}", "Look at {}!", "{} and {}",
    "Where is {}?", "In the park, {}", "“No,” said {}.", "{} went", "It was {}",
)  # fmt: skip


@dataclass(frozen=True)
class User:
    """Who asks for what; two in three greedily, the others with a seed of their own. 3 to 14 tokens."""

    number: int

    @property
    def job(self) -> Job:
        how = HOW[self.number // 10]
        return Job(0.0, how.replace("{}", WHO[self.number % 10]), 3 + self.number % 12)

    @property
    def fields(self) -> dict:
        sampled = {"temperature": 0.8, "seed": self.number, "top_p": 0.9}
        return sampled if self.number % 3 == 2 else {"temperature": 0}


CROWD = [User(i) for i in range(USERS)]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """What each user is told when nobody else is there: one after the other, without a server."""
    llm = LLM("storyteller", max_num_seqs=1)
    asked = [SamplingParams(max_tokens=user.job.max_tokens, **user.fields) for user in CROWD]
    return [
        llm.generate(user.job.prompt, params)[0].outputs[0].text
        for user, params in zip(CROWD, asked, strict=True)
    ]


Refused = Callable[[], None]  # called when a user is refused for the first time


async def ask(http: httpx.AsyncClient, user: User, patiently: bool, refused: Refused) -> list[RequestRecord]:
    """What became of a user's tries: one, or as many as it takes, each when the server said to come again."""
    endpoint, tries = Endpoint(http, "storyteller", timeout=DEADLINE, fields=user.fields), []
    async with asyncio.timeout(DEADLINE):
        while True:
            tries.append(await endpoint.ask(user.job, 0.0))
            if tries[-1].ok or not patiently or tries[-1].retry_after is None:
                return tries
            if len(tries) == 1:
                refused()
            await asyncio.sleep(tries[-1].retry_after)


async def leave(http: httpx.AsyncClient, random: Random) -> None:
    """Hang up in the middle of a long answer, or before its first word."""
    pieces = random.randint(0, 5)
    async with http.stream("POST", "completions", json=ENDLESS, timeout=DEADLINE) as response:
        async for _ in response.aiter_raw():
            pieces -= 1
            if pieces <= 0:
                return


async def storm(
    url: str, seed: int, leavers: int = LEAVERS, patiently: bool = False, refused: Refused = lambda: None
) -> list[list[RequestRecord]]:
    """All users at once, and between them those who leave. Each user's tries."""
    random = Random(seed)
    async with http_client(url) as http, asyncio.TaskGroup() as group:
        order = [*CROWD]
        random.shuffle(order)
        asking = {user: group.create_task(ask(http, user, patiently, refused)) for user in order}
        for _ in range(leavers):
            group.create_task(leave(http, random))
    return [asking[user].result() for user in CROWD]


def refusals(stormed: list[list[RequestRecord]], alone: list[str]) -> Counter:
    """How often who was refused, by status; everything else must be the user's own text."""
    refused = Counter()
    for user, tries, text in zip(CROWD, stormed, alone, strict=True):
        for seen in tries:
            if seen.ok:
                assert seen.text == text, f"user {user.number} was told something else than alone"
            else:
                assert seen.outcome in ("429", "503"), f"user {user.number}: {seen.outcome}"
                assert seen.retry_after, f"user {user.number} was not told when to come again"
                assert not seen.text
                refused[seen.outcome] += 1
    return refused


# From outside


@dataclass
class Outside:
    """A server's process, its URL, and a look at what it holds."""

    process: Process
    url: str
    look: Callable[[], Held]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Outside]:
    """It has room for all who come in a storm, and is stopped as an operator stops it."""
    options = ("--model", "storyteller", "--max-num-queued-reqs", str(PLACES))
    process = Process(tmp_path_factory.mktemp("server"), "", *options)
    try:
        with process.client() as watcher:
            pid = process.process.pid
            yield Outside(process, f"http://127.0.0.1:{process.port}", lambda: held(watcher, pid))
        process.process.terminate()
        assert process.process.wait(DEADLINE) == 0
        assert "Traceback" not in process.said()
    finally:
        process.end()


def test_a_hundred_users_each_get_their_own_text_and_nothing_of_them_is_left(server, alone):
    refusals(asyncio.run(storm(server.url, 0)), alone)  # fills pools and caches
    before = at_rest(server.look, None, DEADLINE)
    for seed in (1, 2):
        stormed = asyncio.run(storm(server.url, seed))
        assert refusals(stormed, alone) == {}, "there was room for all"
    after = at_rest(server.look, before, DEADLINE)
    print(f"before {before}\nafter  {after}")
    assert more(before, after) == {}, "more than before the storms (name: before, after)"
    assert after.memory_mb - before.memory_mb < GROWTH_MB


def test_who_is_refused_is_told_when_to_come_again_and_is_served_then(server, alone):
    """The server is full when the storm comes. It empties once each of the hundred has been refused; those
    who come again when they were told to are all served in the end.
    """

    async def full_then_not() -> list[list[RequestRecord]]:
        everybody, waiting = asyncio.Event(), [USERS]

        def refused() -> None:
            waiting[0] -= 1
            if not waiting[0]:
                everybody.set()

        async def occupy(http: httpx.AsyncClient, begun: asyncio.Event) -> None:
            body = ENDLESS | {"n": PLACES // 2, "max_tokens": 500}
            async with http.stream("POST", "completions", json=body, timeout=DEADLINE) as response:
                assert response.status_code == 200
                begun.set()
                await everybody.wait()

        async with http_client(server.url) as http, asyncio.TaskGroup() as group, asyncio.timeout(DEADLINE):
            for _ in range(2):
                begun = asyncio.Event()
                group.create_task(occupy(http, begun))
                await begun.wait()
            return await storm(server.url, 3, leavers=0, patiently=True, refused=refused)

    before = at_rest(server.look, None, DEADLINE)
    stormed = asyncio.run(full_then_not())
    assert refusals(stormed, alone).total() >= USERS, "there was no room for anybody"
    assert all(tries[-1].outcome == OK for tries in stormed), "who comes again is served in the end"
    after = at_rest(server.look, before, DEADLINE)
    assert more(before, after) == {}, "more than before the storm (name: before, after)"


# From inside


def of_a_request(module: str) -> bool:
    """The dashboard keeps a point for each second, and the last step what it attended to: of a sequence alone
    its pages in one piece.
    """
    return module.startswith("engine.") and not module.startswith(
        ("engine.telemetry.history", "engine.attention", "engine.cache.contiguous")
    )


def inside() -> dict[str, Counter]:
    """What is alive in this process: tasks that are not done, threads, and the engine's own objects."""
    gc.collect()
    objects = gc.get_objects()
    tasks = Counter(str(o.get_coro()) for o in objects if type(o) is asyncio.Task and not o.done())
    ours = Counter(type(o).__qualname__ for o in objects if of_a_request(str(type(o).__module__)))
    threads = Counter(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_"))
    return {"tasks": tasks, "objects": ours, "threads": threads}


def grown(before: dict[str, Counter], after: dict[str, Counter]) -> dict[str, dict]:
    return {kind: dict(left) for kind in before if (left := after[kind] - before[kind])}


def test_no_task_no_thread_and_no_object_of_the_engine_outlives_the_storm(alone):
    engine = build_engine(EngineArgs(model="storyteller"))
    backend = EngineThread(engine, "storyteller")
    metrics = EngineMetrics(engine, "storyteller")
    with serve(create_app(backend, extensions=[telemetry_routes(metrics)])) as url:
        refusals(asyncio.run(storm(url, 5)), alone)
        wait_until(lambda: not engine.has_unfinished_requests())
        before = inside()
        refusals(asyncio.run(storm(url, 6)), alone)
        end = time.monotonic() + DEADLINE
        while grown(before, inside()) and time.monotonic() < end:
            time.sleep(0.5)
        assert grown(before, inside()) == {}, "alive after the storm, and not before it"
        assert backend._mailboxes == {}
        assert engine.scheduler.cache.usage().num_sequences == 0
        assert engine.scheduler.cache.usage().tokens_held == 0
