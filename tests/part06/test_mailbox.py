"""A mailbox by itself: one place for the latest output, and a reader who waits for it.

Nothing runs here: `poll` takes the reader as far as it gets, which is what an event loop does with each turn.
"""

import asyncio
from types import SimpleNamespace

import pytest

from engine.core.mailbox import Mailbox


@pytest.fixture
def mailbox():
    loop = asyncio.new_event_loop()
    yield Mailbox(SimpleNamespace(loop=loop))
    loop.close()


class Reader:
    """One call of `take`, which goes on as far as it gets whenever it is polled."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._call = mailbox.take()
        self.waits_for = None  # what an event loop would wait for before the next turn

    def poll(self):
        """What `take` returned, or "waits"."""
        try:
            self.waits_for = self._call.send(None)
        except StopIteration as end:
            return end.value
        return "waits"

    def leave(self) -> None:
        self._call.close()


def test_an_unread_output_is_taken_at_once(mailbox):
    mailbox.put("Once upon")
    assert Reader(mailbox).poll() == "Once upon", "an output that is unread is taken without a wait"


def test_who_sleeps_through_five_outputs_finds_the_last(mailbox):
    for words in ("Once", "Once upon", "Once upon a", "Once upon a time", "Once upon a time, Al"):
        mailbox.put(words)
    assert Reader(mailbox).poll() == "Once upon a time, Al", (
        "a mailbox holds the latest output: each contains those before it, so nothing is lost"
    )


def test_what_was_taken_is_unread_no_more(mailbox):
    mailbox.put("Once upon")
    Reader(mailbox).poll()
    second = Reader(mailbox)
    assert second.poll() == "waits", "an output is taken once: the next call waits for a later one"
    second.leave()


def test_a_reader_who_waits_is_woken_by_the_next_output(mailbox):
    reader = Reader(mailbox)
    assert reader.poll() == "waits", "with nothing unread, `take` waits"
    assert asyncio.isfuture(reader.waits_for), (
        "a reader waits for a future: one that looks again and again keeps the event loop busy"
    )
    assert not reader.waits_for.done()
    mailbox.put("Once upon")
    assert reader.waits_for.done(), "`put` wakes the reader who waits"
    assert reader.poll() == "Once upon"


def test_a_reader_waits_as_often_as_it_asks(mailbox):
    for words in ("Once", "Once upon", "Once upon a"):
        reader = Reader(mailbox)
        assert reader.poll() == "waits", "each wait has a future of its own: the last one is done for ever"
        mailbox.put(words)
        assert reader.poll() == words


def test_a_later_output_before_the_readers_turn_takes_the_first_ones_place(mailbox):
    reader = Reader(mailbox)
    reader.poll()
    mailbox.put("Once")
    try:
        mailbox.put("Once upon")
    except asyncio.InvalidStateError:
        pytest.fail("`put` raised: the reader was woken before, and has not had its turn yet")
    assert reader.poll() == "Once upon", "the latest output replaces the one that was not read"


def test_a_reader_who_has_gone_is_not_woken(mailbox):
    """A `put` that raised would keep what is handed out behind it from other readers."""
    reader = Reader(mailbox)
    reader.poll()
    reader.waits_for.cancel()  # as when its task is cancelled
    try:
        mailbox.put("Once upon")
    except asyncio.InvalidStateError:
        pytest.fail("`put` raised: the reader's future was cancelled, and nobody waits any more")
    assert mailbox.unread == "Once upon"
    reader.leave()


def test_an_error_is_put_like_an_output(mailbox):
    error = RuntimeError("the engine is not running")
    reader = Reader(mailbox)
    reader.poll()
    try:
        mailbox.put(error)
    except RuntimeError:
        pytest.fail("an error is its reader's: `put` stores it like an output, and raises nothing")
    assert reader.poll() is error, "`take` hands an error out like an output; `Reader` raises it"
