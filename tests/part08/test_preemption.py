"""Memory refuses: who gives way, where they wait, and who starts when there is room again.

From small to large: a newcomer without room, a running request that needs more, one that comes back. What is
given up is in test_put_back.py.
"""

import pytest

from engine.requests.listeners import Listeners
from engine.requests.request import State
from tests.part06.steps import chosen, make_request, play
from tests.part08.schedulers import Told, scheduler

# Memory refuses: a newcomer


def test_a_newcomer_starts_only_with_room_for_its_whole_prompt():
    """Two blocks of four tokens are free. The first chunk, 5 tokens, would fit; the prompt, 12, does not."""
    s = scheduler(budget=6, blocks=4, block_tokens=4)
    s.add(make_request("a", prompt=5, output=2))
    play(s)
    s.add(make_request("long", prompt=12, output=1))
    assert chosen(play(s)) == {"a": 1}, (
        "a newcomer starts only when the cache has room for all its known tokens, "
        "even if it will read them in chunks"
    )
    assert chosen(play(s)) == {"long": 6}
    assert s.cache.blocks == {"long": 3}, "room for all its known tokens is reserved at the start"


def test_a_newcomer_for_whom_there_is_no_room_yet_waits_and_is_not_called_preempted():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("a", prompt=8, output=3))
    play(s)
    newcomer = make_request("big", prompt=12, output=1)
    s.add(newcomer)
    assert chosen(play(s)) == {"a": 1}
    assert s.cache.usage().num_sequences == 1, "a newcomer that is put back gives up its seat in the cache"
    assert (newcomer.num_preemptions, told.names) == (0, []), (
        "a newcomer that finds no room has never run: it is put back, not preempted"
    )
    assert (newcomer.state, newcomer.num_computed_tokens) == (State.WAITING, 0)
    play(s)
    assert chosen(play(s)) == {"big": 12}


def test_the_queue_stays_in_order_even_if_one_behind_would_fit():
    s = scheduler(budget=30, blocks=4, block_tokens=4)
    s.add(make_request("a", prompt=8, output=3))
    play(s)
    s.add(make_request("big", prompt=12, output=1))
    s.add(make_request("small", prompt=2, output=1))
    assert chosen(play(s)) == {"a": 1}, (
        "when the first in the queue finds no room, nobody behind it is admitted"
    )
    assert [request.id for request in s.waiting] == ["big", "small"], "one who is put back keeps its place"


# Memory refuses: a running request


def test_who_needed_the_room_runs_in_the_same_step():
    s = scheduler(budget=30, blocks=4, block_tokens=4)
    for name, prompt in {"a": 8, "b": 7}.items():
        s.add(make_request(name, prompt=prompt, output=6))
    play(s)  # two blocks each: all four
    try:
        step = s.schedule()
    except KeyError:
        pytest.fail("b has given way in this very step, and lost its memory: it gets no token")
    assert step is not None, (
        "once b has given way, `reserve` is asked again, and a has its token in this step"
    )
    assert chosen(step.batch) == {"a": 1}, "who gives way is the worst in rank, not who asks for room"


def test_when_memory_is_short_the_newest_gives_way_and_comes_back_whole():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    a, b = make_request("a", prompt=8, output=6), make_request("b", prompt=7, output=3)
    s.add(a)
    s.add(b)
    assert chosen(play(s)) == {"a": 8, "b": 7}  # two blocks each: all four
    assert chosen(play(s)) == {"a": 1}, (
        "a needs a third block (`reserve` is asked for all of a's tokens, computed and new): b, the worst in "
        "rank, gives way, and `reserve` is asked again"
    )
    assert told.names == ["b"]
    assert (b.state, b.num_computed_tokens, b.num_preemptions) == (State.WAITING, 0, 1)
    assert [chosen(play(s)) for _ in range(3)] == [{"a": 1}] * 3, "b waits until there is room for all of it"
    assert chosen(play(s)) == {"a": 1}
    assert a.state is State.FINISHED
    assert chosen(play(s)) == {"b": 8}, "its prompt and the one token it had are computed again"
    assert chosen(play(s)) == {"b": 1}
    assert b.state is State.FINISHED
    assert told.names == ["b"]


def test_the_worst_priority_gives_way_however_old():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("old but idle", prompt=7, output=9, priority=9))
    play(s)
    s.add(make_request("new", prompt=8, output=9))
    play(s)
    play(s)
    assert told.names == ["old but idle"], "the worst rank gives way, not the newest request"
    assert [request.id for request in s.running] == ["new"]


def test_one_that_is_worst_itself_gives_way_itself():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("a", prompt=5, output=9))
    s.add(make_request("b", prompt=8, output=9))
    play(s)
    assert chosen(play(s)) == {"a": 1}, "b needs more room and is itself the worst in rank: it gives way"
    assert told.names == ["b"]


def test_a_preempted_request_goes_before_those_who_came_after_it():
    s = scheduler(max_num_seqs=2, budget=30, blocks=4, block_tokens=4)
    for name, prompt, output in (("a", 8, 3), ("b", 7, 3), ("c", 1, 1)):
        s.add(make_request(name, prompt=prompt, output=output))
    play(s)
    assert chosen(play(s)) == {"a": 1}
    assert [request.id for request in s.waiting] == ["b", "c"]
    play(s)
    assert list(chosen(play(s))) == ["b", "c"]


def test_in_a_step_that_preempts_nobody_new_is_admitted():
    s = scheduler(max_num_seqs=2, budget=30, blocks=4, block_tokens=4)
    s.add(make_request("a", prompt=8, output=9))
    s.add(make_request("b", prompt=7, output=9, priority=3))
    play(s)
    s.add(make_request("c", prompt=1, output=1))
    assert chosen(play(s)) == {"a": 1}, (
        "a step that preempts admits nobody: c would get the seat and the memory that b has just lost"
    )
    assert chosen(play(s)) == {"a": 1, "c": 1}


def test_after_a_preemption_only_the_last_row_gives_a_token():
    """The first chunk is the prompt, six tokens; the second is what was said since."""
    s = scheduler(budget=6)
    a = make_request("a", prompt=6, output=9)
    s.add(a)
    for _ in range(3):
        play(s)
    s._preempt(a)
    first = s.schedule()
    s.update(first)
    second = s.schedule()
    assert (chosen(first.batch), chosen(second.batch)) == ({"a": 6}, {"a": 3})
    assert (first.batch.rows.chosen, second.batch.rows.chosen) == ((), (2,)), "what it has said, it has said"


def test_what_a_preempted_request_finds_again_is_no_hit():
    """As with a prefix cache (Part 12): the memory that it gave up still holds four of its tokens."""
    s = scheduler()
    a = make_request("a", prompt=5, output=9)
    s.add(a)
    play(s)
    s._preempt(a)
    s.cache.admit = lambda seq, admit=s.cache.admit: admit(seq) or 4
    assert chosen(play(s)) == {"a": 2}, "of its 6 tokens, the cache still has 4"
    assert a.num_cached_tokens == 0, "num_cached_tokens: what the cache had when the request first began"
