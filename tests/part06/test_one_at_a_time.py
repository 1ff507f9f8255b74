"""Long work in a thread of its own: one piece at a time, a bounded number waits, who leaves gives room."""

import asyncio
import threading

import pytest

from engine.core.engine_thread import EngineThread
from engine.core.one_at_a_time import OneAtATime
from engine.decoding.params import NoRoomError, SamplingParams
from engine.requests.work import SlowWork
from tests.part04.serving import DEADLINE, wait_until


class Waiting:
    """Work that waits until it may end, and which of it has begun."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []
        self.at_once = self.most_at_once = 0

    def __call__(self, name: str) -> SlowWork:
        def function() -> str:
            self.begun.append(name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.may_end.wait(DEADLINE)
            self.at_once -= 1
            return name

        return SlowWork(name, function)


async def begin(queue: OneAtATime, work: Waiting, *names: str) -> list[asyncio.Task]:
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(queue.call(work(name))))
        await asyncio.sleep(0)  # the task asks for its turn
    await asyncio.to_thread(wait_until, lambda: bool(work.begun))
    return tasks


def test_one_piece_of_work_is_done_at_a_time_in_the_order_of_the_calls():
    async def run():
        queue, work = OneAtATime("things", 5), Waiting()
        tasks = await begin(queue, work, *"abcdef")
        assert work.begun == ["a"], "the others wait for the first"
        work.may_end.set()
        return await asyncio.gather(*tasks), work

    results, work = asyncio.run(run())
    assert list(results) == work.begun == list("abcdef")
    assert work.most_at_once == 1


def test_who_finds_too_many_waiting_is_refused_and_later_is_not():
    async def run():
        queue, work = OneAtATime("things", 2), Waiting()
        tasks = await begin(queue, work, *"abc")
        with pytest.raises(NoRoomError, match=r"^2 things wait for their turn already$"):
            await queue.call(work("d"))
        work.may_end.set()
        await asyncio.gather(*tasks)
        await asyncio.to_thread(wait_until, lambda: queue.num_calls == 0)
        assert await queue.call(work("e")) == "e"
        return work.begun

    assert asyncio.run(run()) == list("abce"), "what is refused is never called"


def test_the_same_work_is_done_once_for_all_who_ask_meanwhile():
    async def run():
        queue, work = OneAtATime("things", 1), Waiting()
        tasks = await begin(queue, work, *"abbabb")
        assert queue.num_calls == 2, "a further caller takes no further place"
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        work.may_end.set()
        others = [task for i, task in enumerate(tasks) if i != 1]
        return await asyncio.gather(*others), work.begun

    results, begun = asyncio.run(run())
    assert results == list("ababb"), "who leaves takes nothing from the others"
    assert begun == ["a", "b"]


def test_who_leaves_before_its_turn_gives_its_place_and_is_never_called():
    async def run():
        queue, work = OneAtATime("things", 2), Waiting()
        tasks = await begin(queue, work, *"abc")
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert queue.num_calls == 2, "a place is free again"
        tasks.append(asyncio.create_task(queue.call(work("d"))))
        await asyncio.sleep(0)
        work.may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return work.begun

    assert asyncio.run(run()) == list("acd")


def test_an_exception_is_its_callers_and_the_next_goes_on():
    def fail() -> None:
        raise ZeroDivisionError

    async def run():
        queue = OneAtATime("things", 2)
        works = SlowWork("fails", fail), SlowWork("fails", fail), SlowWork("five", lambda: 5)
        first, second, five = await asyncio.gather(*map(queue.call, works), return_exceptions=True)
        return [type(first), type(second), five]

    assert asyncio.run(run()) == [ZeroDivisionError, ZeroDivisionError, 5]


def test_work_of_a_request_is_done_before_its_samples_are_made_and_only_where_there_is_any(fake_engine):
    told = []

    class Preparation:
        """Has work for requests with a seed."""

        def slow_work(self, params: SamplingParams) -> SlowWork | None:
            return None if params.seed is None else SlowWork("seeds", lambda: told.append("work"))

        def prepare(self, samples) -> None:
            told.append("samples")

    engine = EngineThread(fake_engine(preparations=[Preparation()]), "fake")

    async def ask(seed: int | None) -> None:
        """Makes the request, and reads nothing of it."""
        await engine.generate("hello", SamplingParams(seed=seed, max_tokens=2), "a")

    for seed in (None, 5):
        asyncio.run(ask(seed))
    assert told == ["samples", "work", "samples"]
