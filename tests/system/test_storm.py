"""A hundred users at once. Each gets exactly its own text, or a clean refusal; then nothing of them is left.

From outside, at `ruvon serve` in a process of its own: what its users read, and what /proc and /metrics say
it holds. From inside, at the same server in a thread: its tasks, its threads, and the engine's objects.
"""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import httpx
import pytest

from benchmarks.load import client
from benchmarks.load_client import OK, Seen, Target
from benchmarks.load_plan import Job
from benchmarks.load_process import Held, at_rest, held, more
from engine import LLM, SamplingParams
from engine.async_engine import AsyncLLMEngine
from engine.llm import EngineArgs, build_engine
from engine.server.app import create_app
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.routes import telemetry
from tests.part04.serving import serve, wait_until
from tests.system.test_hostile_clients import ENDLESS, Process

USERS, LEAVERS, PLACES = 100, 20, 30
DEADLINE = 120.0  # seconds after which what we wait for will never come: not a promise about speed
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
    """Who asks for what; two in three greedily, the others with a seed of their own. 4 to 23 tokens."""

    number: int

    @property
    def job(self) -> Job:
        how = HOW[self.number // 10]
        return Job(0.0, how.replace("{}", WHO[self.number % 10]), 4 + self.number % 20)

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


async def ask(http: httpx.AsyncClient, user: User, patiently: bool) -> list[Seen]:
    """What became of a user's tries: one, or as many as it takes, each when the server said to come again."""
    target, tries = Target(http, "storyteller", timeout=DEADLINE, fields=user.fields), []
    async with asyncio.timeout(DEADLINE):
        while True:
            tries.append(await target.ask(user.job, 0.0))
            if tries[-1].ok or not patiently or tries[-1].retry_after is None:
                return tries
            await asyncio.sleep(tries[-1].retry_after)


async def leave(http: httpx.AsyncClient, random: Random) -> None:
    """Hang up in the middle of a long answer, or before its first word."""
    pieces = random.randint(0, 5)
    async with http.stream("POST", "completions", json=ENDLESS, timeout=DEADLINE) as response:
        async for _ in response.aiter_raw():
            pieces -= 1
            if pieces <= 0:
                return


async def storm(url: str, seed: int, patiently: bool = False, leavers: int = LEAVERS) -> list[list[Seen]]:
    """All users at once, and between them those who leave. Each user's tries."""
    random = Random(seed)
    async with client(url) as http, asyncio.TaskGroup() as group:
        order = [*CROWD]
        random.shuffle(order)
        asking = {user: group.create_task(ask(http, user, patiently)) for user in order}
        for _ in range(leavers):
            group.create_task(leave(http, random))
    return [asking[user].result() for user in CROWD]


def refusals(stormed: list[list[Seen]], alone: list[str]) -> Counter:
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
def servers(tmp_path_factory) -> Iterator[dict[str, Outside]]:
    """One that has room for all, and one that has not; both are stopped as an operator stops them."""
    options = {"roomy": "", "tight": f"MAX_REQUESTS={PLACES}"}
    processes = {
        name: Process(tmp_path_factory.mktemp(name), settings, "--model", "storyteller")
        for name, settings in options.items()
    }
    found, watchers = {}, []
    try:
        for name, process in processes.items():
            watcher = process.client()
            watchers.append(watcher)
            pid = process.process.pid
            found[name] = Outside(
                process,
                f"http://127.0.0.1:{process.port}",
                lambda watcher=watcher, pid=pid: held(watcher, pid),
            )
        yield found
        for process in processes.values():
            process.process.terminate()
            assert process.process.wait(DEADLINE) == 0
            assert "Traceback" not in process.said()
    finally:
        for watcher in watchers:
            watcher.close()
        for process in processes.values():
            process.end()


def test_a_hundred_users_each_get_their_own_text_and_nothing_of_them_is_left(servers, alone):
    server = servers["roomy"]
    refusals(asyncio.run(storm(server.url, 0)), alone)  # fills pools and caches
    before = at_rest(server.look, None, DEADLINE)
    for seed in (1, 2):
        stormed = asyncio.run(storm(server.url, seed))
        assert refusals(stormed, alone) == {}, "there was room for all"
    after = at_rest(server.look, before, DEADLINE)
    print(f"before {before}\nafter  {after}")
    assert more(before, after) == {}, "more than before the storms (name: before, after)"
    assert after.memory_mb - before.memory_mb < GROWTH_MB


def test_who_is_refused_is_told_when_to_come_again_and_is_served_then(servers, alone):
    """The server is full when the storm comes, so that all are refused; those who come again are served."""
    server = servers["tight"]

    async def full_then_patient() -> tuple[list[list[Seen]], list[list[Seen]]]:
        async with client(server.url) as http:

            async def occupy(begun: asyncio.Event, n: int) -> None:
                body = ENDLESS | {"n": n}
                async with http.stream("POST", "completions", json=body, timeout=DEADLINE) as response:
                    assert response.status_code == 200
                    begun.set()
                    await asyncio.Event().wait()  # reads nothing more, and stays

            staying = []
            async with asyncio.timeout(DEADLINE):
                for i in range(PLACES):  # the first has 128 answers of 1,000 tokens: the others only wait
                    begun = asyncio.Event()
                    staying.append(asyncio.create_task(occupy(begun, 1 if i else 128)))
                    await begun.wait()
            at_first = await storm(server.url, 3, leavers=0)
            for task in staying:
                task.cancel()
            await asyncio.gather(*staying, return_exceptions=True)
            return at_first, await storm(server.url, 4, patiently=True, leavers=0)

    before = at_rest(server.look, None, DEADLINE)
    at_first, later = asyncio.run(full_then_patient())
    assert refusals(at_first, alone).total() == USERS, "there was no room for anybody"
    refusals(later, alone)
    assert all(tries[-1].outcome == OK for tries in later), "who comes again is served in the end"
    after = at_rest(server.look, before, DEADLINE)
    assert more(before, after) == {}, "more than before the storms (name: before, after)"


# From inside


def inside() -> dict[str, Counter]:
    """What is alive in this process: tasks that are not done, threads, and the engine's own objects."""
    gc.collect()
    objects = gc.get_objects()
    tasks = Counter(str(o.get_coro()) for o in objects if isinstance(o, asyncio.Task) and not o.done())
    ours = Counter(type(o).__qualname__ for o in objects if type(o).__module__.startswith("engine."))
    threads = Counter(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_"))
    return {"tasks": tasks, "objects": ours, "threads": threads}


def grown(before: dict[str, Counter], after: dict[str, Counter]) -> dict[str, dict]:
    return {kind: dict(left) for kind in before if (left := after[kind] - before[kind])}


def test_no_task_no_thread_and_no_object_of_the_engine_outlives_the_storm(alone):
    engine = build_engine(EngineArgs(model="storyteller"))
    backend = AsyncLLMEngine(engine, "storyteller")
    metrics = EngineMetrics(engine, "storyteller")
    with serve(create_app(backend, extensions=[telemetry(metrics)])) as url:
        refusals(asyncio.run(storm(url, 5)), alone)
        wait_until(lambda: not engine.has_unfinished_requests())
        before = inside()
        refusals(asyncio.run(storm(url, 6)), alone)
        wait_until(lambda: not engine.has_unfinished_requests() and not grown(before, inside()))
        assert grown(before, inside()) == {}
        assert backend._mailboxes == {}
        assert engine.scheduler.cache.usage().num_sequences == 0
        assert engine.scheduler.cache.usage().tokens_held == 0
