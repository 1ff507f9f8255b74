"""`_unless_client_leaves` alone: the work and the client's messages are made here."""

import asyncio

import pytest

from engine.server.complete import _unless_client_leaves
from engine.server.errors import RequestError
from tests.part04.serving import ends


class Client:
    """A request whose messages come one by one; after the last one there is silence."""

    def __init__(self, *types):
        self.messages = [{"type": kind} for kind in types]
        self.was_polled = False

    async def receive(self):
        await asyncio.sleep(0)
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def is_disconnected(self):
        self.was_polled = True
        return False


class Work:
    """Takes some turns of the event loop (None: all), then gives a result or fails; unwinding takes one."""

    def __init__(self, turns=0, error=None):
        self.turns, self.error, self.over = turns, error, None

    async def __call__(self):
        try:
            self.over = False
            if self.turns is None:
                await asyncio.Event().wait()
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if self.error:
                raise self.error
            return ["the answer"]
        finally:
            await asyncio.sleep(0)
            self.over = True


def outcome(client, work, words):
    """What comes back or is raised (`words`: it never ends), and how many tasks are left over."""

    async def ask():
        try:
            got = await _unless_client_leaves(client, work())
        except (RequestError, ValueError, asyncio.CancelledError) as error:
            got = error  # a cancelled listener's CancelledError is nobody's to know
        return got, len(asyncio.all_tasks()) - 2, work.over  # but this one and `run`

    async def run():
        asking = asyncio.ensure_future(ask())
        has_ended = await ends(asking)
        if client.was_polled:
            pytest.fail(
                "wait for `await request.receive()`: `is_disconnected` would have to be asked for ever", False
            )
        if not has_ended:
            pytest.fail(words, False)
        return asking.result()

    return asyncio.run(run())


def test_work_that_is_done_at_once_is_the_answer():
    words = "the answer waits for a message of the client that never comes"
    got, _, _ = outcome(Client(), Work(), words)
    assert got == ["the answer"], "what the work gives is what comes back"


def test_work_that_takes_its_time_is_waited_for():
    got, _, _ = outcome(Client(), Work(turns=20), "the answer waits for a message that never comes")
    assert got == ["the answer"], "the work is waited for as long as the client is there"


def test_what_the_work_raises_is_raised():
    error = ValueError("no such word")
    got, _, _ = outcome(Client(), Work(turns=2, error=error), "the error never comes out")
    assert got is error, "an error of the work is raised as it is"


def test_a_client_that_leaves_ends_the_work():
    words = "the client has left, and the work goes on: nobody listens for http.disconnect"
    got, _, over = outcome(Client("http.disconnect"), Work(turns=None), words)
    assert isinstance(got, RequestError), "when the client leaves, a RequestError is raised"
    assert got.status == 499, "a client that left is the status 499"
    assert over, "the work is not only told to stop: it has unwound before the function returns"


def test_only_a_disconnect_means_that_the_client_has_left():
    got, _, _ = outcome(Client("http.request", "http.request"), Work(turns=20), "the answer never comes")
    assert got == ["the answer"], "messages other than http.disconnect do not end the work"


@pytest.mark.parametrize("turns", [0, 20])
def test_nobody_listens_when_the_answer_is_there(turns):
    _, left, _ = outcome(Client(), Work(turns=turns), "the answer never comes")
    assert left == 0, "nothing is left running: the task that listens is cancelled too"


def test_being_cancelled_itself_it_takes_the_work_along():
    work = Work(turns=None)

    async def run():
        waiting = asyncio.ensure_future(_unless_client_leaves(Client(), work()))
        while work.over is None and not waiting.done():
            await asyncio.sleep(0)
        waiting.cancel()
        if await ends(waiting) and not waiting.cancelled():
            waiting.result()
        return work.over, len(asyncio.all_tasks()) - 1

    over, left = asyncio.run(run())
    assert (over, left) == (True, 0), "cancelled itself, it leaves neither the work nor the listener running"


def test_when_the_result_and_the_goodbye_are_there_at_once_the_result_counts():
    class Waiting:
        """Both come in the same turn of the event loop."""

        def __init__(self):
            self.now = asyncio.Event()

        async def receive(self):
            await self.now.wait()
            return {"type": "http.disconnect"}

    async def run():
        client = Waiting()

        async def work():
            await client.now.wait()
            return ["the answer"]

        asyncio.get_running_loop().call_later(0.01, client.now.set)
        answer = asyncio.ensure_future(_unless_client_leaves(client, work()))
        assert await ends(answer), "both are there, and nothing comes back"
        return answer.result()

    try:
        got = asyncio.run(run())
    except RequestError as error:
        got = error
    assert got == ["the answer"], f"the work was done: its result counts, not {got!r}"
