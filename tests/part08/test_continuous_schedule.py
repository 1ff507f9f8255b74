"""Who runs in which step: one budget, no phases, in order of rank, and who gives way when memory is short."""

import pytest

from engine.listeners import Listener, Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import State
from tests.part06.fakes import BlockCache
from tests.part06.steps import chosen, make_request, play


def scheduler(max_num_seqs=4, budget=16, blocks=100, block_tokens=4, listeners=None) -> ContinuousScheduler:
    made = ContinuousScheduler(BlockCache(blocks, block_tokens), max_num_seqs, budget)
    made.listeners = listeners or Listeners()
    return made


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(0, 5), (5, 4), (-1, 5), (1, 0)])
def test_a_budget_that_cannot_give_each_running_request_a_token_is_refused(max_num_seqs, budget):
    with pytest.raises(ValueError, match="max_num_seqs"):
        scheduler(max_num_seqs, budget)


def test_a_newcomer_joins_the_next_step_while_others_are_in_flight():
    s = scheduler()
    s.add(make_request("a", prompt=3, output=9))
    assert chosen(play(s)) == {"a": 3}
    assert chosen(play(s)) == {"a": 1}
    s.add(make_request("b", prompt=5, output=9))
    assert chosen(play(s)) == {"a": 1, "b": 5}
    assert chosen(play(s)) == {"a": 1, "b": 1}


def test_a_long_prompt_comes_in_chunks_beside_running_requests():
    s = scheduler(budget=10)
    s.add(make_request("a", prompt=2, output=9))
    play(s)
    s.add(make_request("long", prompt=25, output=2))
    assert [chosen(play(s)) for _ in range(4)] == [
        {"a": 1, "long": 9},
        {"a": 1, "long": 9},
        {"a": 1, "long": 7},
        {"a": 1, "long": 1},
    ]


def test_budget_left_over_by_a_last_chunk_goes_to_the_next_in_line():
    s = scheduler(budget=10)
    for name, prompt in {"a": 14, "b": 3, "c": 12}.items():
        s.add(make_request(name, prompt=prompt, output=5))
    assert [chosen(play(s)) for _ in range(3)] == [
        {"a": 10},
        {"a": 4, "b": 3, "c": 3},
        {"a": 1, "b": 1, "c": 8},
    ]


def test_seats_are_never_exceeded_and_a_freed_one_is_taken_in_the_next_step():
    s = scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(make_request(name, prompt=2, output=2))
    assert [chosen(play(s)) for _ in range(4)] == [{"a": 2, "b": 2}, {"a": 1, "b": 1}, {"c": 2}, {"c": 1}]
    assert s.schedule() is None


def test_better_priority_goes_first_and_equals_in_order_of_arrival():
    s = scheduler(max_num_seqs=1)
    for name, priority in {"a": 1, "b": 0, "c": 1, "d": -3, "e": 0}.items():
        s.add(make_request(name, prompt=1, output=1, priority=priority))
    assert [next(iter(chosen(play(s)))) for _ in range(5)] == ["d", "b", "e", "a", "c"]


def test_a_better_newcomer_does_not_take_the_seat_of_one_who_runs():
    s = scheduler(max_num_seqs=1)
    s.add(make_request("slow", prompt=1, output=3, priority=5))
    play(s)
    s.add(make_request("urgent", prompt=1, output=1, priority=-5))
    assert [list(chosen(play(s))) for _ in range(3)] == [["slow"], ["slow"], ["urgent"]]


class Told(Listener):
    def __init__(self):
        self.names = []

    def on_preempt(self, request):
        self.names.append(request.id)


def test_when_memory_is_short_the_newest_gives_way_and_comes_back_whole():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    a, b = make_request("a", prompt=8, output=6), make_request("b", prompt=7, output=3)
    s.add(a)
    s.add(b)
    assert chosen(play(s)) == {"a": 8, "b": 7}  # two blocks each: all four
    assert chosen(play(s)) == {"a": 1}  # a needs its third block
    assert told.names == ["b"]
    assert (b.state, b.num_computed_tokens, b.num_preemptions) == (State.WAITING, 0, 1)
    assert [chosen(play(s)) for _ in range(3)] == [{"a": 1}] * 3
    assert chosen(play(s)) == {"a": 1}
    assert a.state is State.FINISHED
    assert chosen(play(s)) == {"b": 8}  # its prompt and the one token it had: computed again
    assert chosen(play(s)) == {"b": 1}
    assert b.state is State.FINISHED
    assert told.names == ["b"]


def test_preempting_takes_memory_and_computed_tokens_but_not_the_place_in_the_queue():
    told = Told()
    s = scheduler(listeners=Listeners([told]))
    a, b, c = (make_request(name, prompt=5, output=9) for name in "abc")
    for request in (a, b, c):
        s.add(request)
    s.admit_next()
    s.admit_next()
    b.num_computed_tokens, b.draft_ids, b.prompt_logprobs = 5, [91], [{7: None}]
    s._preempt(b)
    assert (s.running, s.waiting) == ([a], [b, c])
    assert (b.state, b.num_computed_tokens, b.draft_ids, b.num_preemptions) == (State.WAITING, 0, [], 1)
    assert b.prompt_logprobs == []  # computed again, they would be told twice
    assert s.cache.usage().num_sequences == 1
    assert told.names == ["b"]


def test_the_worst_priority_gives_way_however_old():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("old but idle", prompt=7, output=9, priority=9))
    play(s)
    s.add(make_request("new", prompt=8, output=9))
    play(s)
    play(s)
    assert told.names == ["old but idle"]
    assert [request.id for request in s.running] == ["new"]


def test_one_that_is_worst_itself_gives_way_itself():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("a", prompt=5, output=9))
    s.add(make_request("b", prompt=8, output=9))
    play(s)
    assert chosen(play(s)) == {"a": 1}
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


def test_a_newcomer_for_whom_there_is_no_room_yet_waits_and_is_not_called_preempted():
    told = Told()
    s = scheduler(budget=30, blocks=4, block_tokens=4, listeners=Listeners([told]))
    s.add(make_request("a", prompt=8, output=3))
    play(s)
    newcomer = make_request("big", prompt=12, output=1)
    s.add(newcomer)
    assert chosen(play(s)) == {"a": 1}
    assert s.cache.usage().num_sequences == 1
    assert (newcomer.state, newcomer.num_computed_tokens, newcomer.num_preemptions) == (State.WAITING, 0, 0)
    assert told.names == []
    play(s)
    assert chosen(play(s)) == {"big": 12}


def test_in_a_step_that_preempts_nobody_new_is_admitted():
    s = scheduler(max_num_seqs=2, budget=30, blocks=4, block_tokens=4)
    s.add(make_request("a", prompt=8, output=9))
    s.add(make_request("b", prompt=7, output=9, priority=3))
    play(s)
    s.add(make_request("c", prompt=1, output=1))
    assert chosen(play(s)) == {"a": 1}  # b has gone, and c would have its seat and its memory
    assert chosen(play(s)) == {"a": 1, "c": 1}


def test_a_step_taken_back_is_scheduled_again():
    s = scheduler(budget=10)
    a, b = make_request("a", prompt=4, output=5), make_request("b", prompt=13, output=5)
    s.add(a)
    s.add(b)
    batch = s.schedule()
    s.rollback(batch)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (0, 0)
    assert chosen(play(s)) == chosen(batch) == {"a": 4, "b": 6}
    batch = s.schedule()
    s.rollback(batch)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (4, 6)
    assert chosen(play(s)) == {"a": 1, "b": 7}


def test_drafts_are_tokens_like_any_other_and_rejected_ones_are_computed_no_more():
    s = scheduler(budget=10)
    a = make_request("a", prompt=4, output=9)
    s.add(a)
    play(s)
    a.draft_ids = [91, 92, 93]
    batch = s.schedule()
    assert chosen(batch) == {"a": 4}
    a.confirm(1, 0.0), a.confirm(2, 0.0)  # one draft accepted, one token of its own
    s.update(batch, drafts=[[94]])
    assert a.num_computed_tokens == len(a.token_ids) - 1
    assert a.draft_ids == [94]
    assert chosen(s.schedule()) == {"a": 2}


def test_finishing_frees_memory_wherever_the_request_is_and_only_once():
    s = scheduler(max_num_seqs=1)
    running, waiting = make_request("a", prompt=4, output=5), make_request("b", prompt=4, output=5)
    s.add(running)
    s.add(waiting)
    play(s)
    for request in (running, waiting, running, waiting):
        s.finish(request)
        assert request.state is State.FINISHED
    assert (s.running, s.waiting, s.cache.usage().num_sequences) == ([], [], 0)


def test_nothing_to_do_is_no_batch():
    assert scheduler().schedule() is None


def test_what_a_cache_already_has_is_not_computed_again():
    """As a prefix cache will (Part 12): `begin` says how many tokens are there."""
    s = scheduler(budget=30)
    s.cache.begin = lambda seq, begin=s.cache.begin: begin(seq) or 6
    a = make_request("a", prompt=10, output=2)
    s.add(a)
    batch = play(s)
    assert chosen(batch) == {"a": 4}
    assert batch.positions == (6, 7, 8, 9)
    assert a.num_cached_tokens == 6


def test_a_better_newcomers_long_prompt_leaves_every_running_request_its_token():
    s = scheduler(budget=10)
    s.add(make_request("low", prompt=2, output=9, priority=5))
    play(s)
    s.add(make_request("high", prompt=25, output=2, priority=0))
    assert [chosen(play(s)) for _ in range(3)] == [
        {"low": 1, "high": 9},
        {"high": 9, "low": 1},
        {"high": 7, "low": 1},
    ]
