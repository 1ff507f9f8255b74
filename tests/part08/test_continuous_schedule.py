"""Who runs in which step: one budget, no phases, in order of rank. There is memory for all.

From small to large: one request, several, a budget, ranks. The scheduler is alone: each step is taken to go
well, and each request whose known tokens are all computed gets one more.
"""

import pytest

from engine.requests.request import State
from tests.part06.steps import chosen, make_request, play, scheduled
from tests.part08.schedulers import scheduler


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(0, 5), (5, 4), (-1, 5), (1, 0)])
def test_a_budget_that_cannot_give_each_running_request_a_token_is_refused(max_num_seqs, budget):
    with pytest.raises(ValueError, match="max_num_seqs"):
        scheduler(max_num_seqs, budget)


def test_nothing_to_do_is_no_batch():
    assert scheduler().schedule() is None, "with nothing to do there is no batch, not an empty one"


# One request


def test_one_request_reads_its_prompt_and_then_computes_a_token_a_step():
    s = scheduler()
    s.add(make_request("a", prompt=5, output=3))
    assert [chosen(play(s)) for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}], (
        "a request computes what it lacks: known tokens minus computed ones"
    )
    assert s.schedule() is None


def test_each_step_is_counted():
    s = scheduler()
    for _ in range(3):
        s.schedule()
    assert s._step == 3, (
        "each call of schedule() adds one to self._step, even if there is nothing to do: ranks age by it"
    )


def test_a_prompt_larger_than_the_budget_comes_in_chunks():
    s = scheduler(budget=10)
    s.add(make_request("long", prompt=25, output=2))
    step = s.schedule()
    assert step is not None, "a prompt larger than the budget waits for no larger budget: it comes in chunks"
    s.rollback(step)
    assert [chosen(play(s)) for _ in range(4)] == [{"long": 10}, {"long": 10}, {"long": 5}, {"long": 1}], (
        "a step computes no more tokens than its budget, and goes on where the last one stopped"
    )


# Several


def test_a_newcomer_joins_the_next_step_while_others_are_in_flight():
    s = scheduler()
    s.add(make_request("a", prompt=3, output=9))
    assert chosen(play(s)) == {"a": 3}
    assert chosen(play(s)) == {"a": 1}
    s.add(make_request("b", prompt=5, output=9))
    assert chosen(play(s)) == {"a": 1, "b": 5}, "a newcomer joins the next step while others are in flight"
    assert chosen(play(s)) == {"a": 1, "b": 1}


def test_running_requests_come_before_newcomers():
    s = scheduler(budget=4)
    s.add(make_request("a", prompt=3, output=9))
    play(s)
    s.add(make_request("b", prompt=9, output=9))
    assert chosen(play(s)) == {"a": 1, "b": 3}, (
        "running requests have their tokens before newcomers get what is left of the budget"
    )


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
    ], "a token is left for each one behind, and nobody is behind the last: it gets what the others left"


def test_budget_left_over_by_a_last_chunk_goes_to_the_next_in_line():
    s = scheduler(budget=10)
    for name, prompt in {"a": 14, "b": 3, "c": 12}.items():
        s.add(make_request(name, prompt=prompt, output=5))
    assert [chosen(play(s)) for _ in range(3)] == [
        {"a": 10},
        {"a": 4, "b": 3, "c": 3},
        {"a": 1, "b": 1, "c": 8},
    ], "what one leaves of the budget goes to the next in line"


def test_seats_are_never_exceeded_and_a_freed_one_is_taken_in_the_next_step():
    s = scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(make_request(name, prompt=2, output=2))
    assert chosen(play(s)) == {"a": 2, "b": 2}, "at most max_num_seqs requests run"
    assert [chosen(play(s)) for _ in range(3)] == [{"a": 1, "b": 1}, {"c": 2}, {"c": 1}], (
        "a seat that became free is taken in the next step"
    )
    assert s.schedule() is None


def test_a_long_prompt_leaves_every_running_request_its_token():
    """The long one is first in rank, and running: it may take the budget but for one token of each other."""
    s = scheduler(budget=10)
    s.add(make_request("low", prompt=2, output=9, priority=5))
    play(s)
    s.add(make_request("high", prompt=25, output=2, priority=0))
    assert [chosen(play(s)) for _ in range(3)] == [
        {"low": 1, "high": 9},
        {"high": 9, "low": 1},
        {"high": 7, "low": 1},
    ], "a long prompt leaves each running request behind it one token of the budget"


def test_the_articles_three_steps():
    """A, best in rank, lacks 20 tokens; B and C are being answered; d and e wait."""
    s = scheduler(budget=16)
    for name in "BC":
        s.add(make_request(name, prompt=1, output=9, priority=1))
    play(s)
    s.add(make_request("A", prompt=34, output=9))
    play(s)  # 14 of them
    s.add(make_request("d", prompt=10, output=9, priority=2))
    s.add(make_request("e", prompt=3, output=9, priority=2))
    assert [chosen(play(s)) for _ in range(3)] == [
        {"A": 14, "B": 1, "C": 1},
        {"A": 6, "B": 1, "C": 1, "d": 8},
        {"A": 1, "B": 1, "C": 1, "d": 2},
    ], "see 'One step, by hand' in the article"


# Ranks


def test_better_priority_goes_first_and_equals_in_order_of_arrival():
    s = scheduler(max_num_seqs=1)
    for name, priority in {"a": 1, "b": 0, "c": 1, "d": -3, "e": 0}.items():
        s.add(make_request(name, prompt=1, output=1, priority=priority))
    order = [next(iter(chosen(play(s)))) for _ in range(5)]
    assert order == ["d", "b", "e", "a", "c"], (
        "the best priority goes first, and of equals the one who came first"
    )


def test_running_requests_share_the_budget_in_order_of_rank():
    """Each has more to compute than the budget, and low was admitted first."""
    s = scheduler(budget=10)
    low, high = (
        make_request("low", prompt=12, output=2, priority=5),
        make_request("high", prompt=12, output=2),
    )
    s.add(low)
    play(s)
    s.add(high)
    play(s)  # low reads its last two tokens, high the first eight of its own
    low.draft_ids = [91] * 9  # and low has ten tokens to compute again
    assert list(scheduled(s).items()) == [("high", 4), ("low", 6)], (
        "running requests are served best rank first, whenever they were admitted"
    )


def test_a_better_newcomer_does_not_take_the_seat_of_one_who_runs():
    s = scheduler(max_num_seqs=1)
    s.add(make_request("slow", prompt=1, output=3, priority=5))
    play(s)
    s.add(make_request("urgent", prompt=1, output=1, priority=-5))
    assert [list(chosen(play(s))) for _ in range(3)] == [["slow"], ["slow"], ["urgent"]], (
        "a better newcomer waits for a seat; only a lack of memory takes one away"
    )


# What later parts bring, and steps that go wrong


def test_a_step_taken_back_is_scheduled_again():
    s = scheduler(budget=10)
    a, b = make_request("a", prompt=4, output=5), make_request("b", prompt=13, output=5)
    s.add(a)
    s.add(b)
    step = s.schedule()
    s.rollback(step)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (0, 0)
    assert chosen(play(s)) == chosen(step.batch) == {"a": 4, "b": 6}
    step = s.schedule()
    s.rollback(step)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (4, 6)
    assert chosen(play(s)) == {"a": 1, "b": 7}


def test_a_request_with_nothing_to_compute_is_left_out():
    """Its prompt has been scheduled, and the token that follows is not known yet (Part 13)."""
    s = scheduler()
    s.add(make_request("a", prompt=4, output=9))
    s.schedule()
    assert s.schedule() is None, "a request with nothing to compute is not part of a step"
    s.add(make_request("b", prompt=3, output=9))
    assert scheduled(s) == {"b": 3}


def test_who_has_nothing_to_compute_keeps_its_seat():
    """Its last token is on its way (Part 13)."""
    s = scheduler(max_num_seqs=1)
    s.add(make_request("a", prompt=4, output=9))
    s.schedule()
    s.add(make_request("b", prompt=3, output=9))
    s.schedule()
    assert [request.id for request in s.running] == ["a"], (
        "seats are counted among those who run, not among those who compute in this step"
    )


def test_drafts_are_tokens_like_any_other_and_rejected_ones_are_computed_no_more():
    s = scheduler(budget=10)
    a = make_request("a", prompt=4, output=9)
    s.add(a)
    play(s)
    a.draft_ids = [91, 92, 93, 94]
    step = s.schedule()
    assert chosen(step and step.batch) == {"a": 5}
    assert s.cache.blocks == {"a": 3}, "room is reserved for drafts, too: 9 tokens, three blocks of four"
    a.confirm(1, 0.0), a.confirm(2, 0.0)  # one draft accepted, one token of its own
    s.update(step, drafts=[[95]])
    assert a.num_computed_tokens == len(a.token_ids) - 1
    assert a.draft_ids == [95]
    assert scheduled(s) == {"a": 2}


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


def test_what_a_cache_already_has_is_not_computed_again():
    """As a prefix cache will (Part 12): `admit` says how many tokens are there."""
    s = scheduler(budget=30)
    s.cache.admit = lambda seq, admit=s.cache.admit: admit(seq) or 6
    a = make_request("a", prompt=10, output=2)
    s.add(a)
    batch = play(s)
    assert chosen(batch) == {"a": 4}, "a newcomer computes only what the cache does not have already"
    assert batch.positions == (6, 7, 8, 9)
    assert a.num_cached_tokens == 6
