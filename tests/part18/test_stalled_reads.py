"""A file that never answers, as in a network folder that has gone, keeps nobody from ending."""

import asyncio
import threading

import pytest

from engine.server.adapters import in_daemon_thread
from tests.part04.serving import DEADLINE


def test_what_the_function_returns_or_raises_comes_from_a_thread_of_its_own():
    async def run():
        assert await in_daemon_thread(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(lambda: 1 / 0)

    asyncio.run(run())


@pytest.mark.parametrize("left", [False, True], ids=["under way", "left by its client"])
def test_an_event_loop_and_a_process_end_while_a_read_stalls(left):
    """Both waited for it: after SIGTERM the server was there for as long as the file did not answer."""
    begun, answers, readers = threading.Event(), threading.Event(), []

    def read() -> None:
        readers.append(threading.current_thread())
        begun.set()
        answers.wait()

    async def run():
        reading = asyncio.create_task(in_daemon_thread(read))
        while not begun.is_set():
            await asyncio.sleep(0)
        if left:
            reading.cancel()

    ending = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    ending.start()
    try:
        ending.join(DEADLINE)
        assert not ending.is_alive(), "the event loop waits for the read"
        assert readers[0].is_alive()
        assert readers[0].daemon, "Python waits at its end for threads that are none"
    finally:
        answers.set()
    readers[0].join(DEADLINE)
    assert not readers[0].is_alive(), "it ends once the file answers, though nobody waits for it any more"
