"""What a request gives up when its memory goes to another, and where it waits.

These tests call `_put_back` alone, by way of `_preempt`: no step is scheduled.
"""

from engine.requests.listeners import Listeners
from engine.requests.request import State
from tests.part06.steps import make_request
from tests.part08.schedulers import Told, scheduler


def test_a_preempted_request_goes_back_to_its_old_place_with_nothing_computed():
    """b comes between a, who runs, and c, who came after it and waits."""
    s = scheduler()
    a, b, c = (make_request(name, prompt=5, output=9) for name in "abc")
    for request in (a, b, c):
        s.add(request)
    s.admit_next()
    s.admit_next()
    b.confirm(7, 0.0)
    b.num_computed_tokens, b.draft_ids, b.prompt_logprobs = 5, [91], [{7: None}]
    rank = b.rank
    s._preempt(b)
    assert [request.id for request in s.running] == ["a"], "who is preempted runs no longer"
    assert b.rank == rank, "the rank given at arrival never changes"
    assert [request.id for request in s.waiting] == ["b", "c"], (
        "who is preempted goes back to its old place: before those who came later, behind those before it"
    )
    assert b.state is State.WAITING, "who is preempted waits again"
    assert s.cache.usage().num_sequences == 1, "the cache takes back a preempted request's memory"
    assert b.num_computed_tokens == 0, "without its memory, none of a request's tokens counts as computed"
    assert b.token_ids == [*range(5), 7], "what a request has said stays said: it is a list of numbers"
    assert (b.draft_ids, b.prompt_logprobs) == ([], []), (
        "drafts and the prompt's log probabilities are forgotten: they will be found again"
    )


def test_giving_way_is_not_the_end_of_a_request(monkeypatch):
    s, asked = scheduler(), []
    for name in ("preempt", "release"):
        call = getattr(s.cache, name)
        monkeypatch.setattr(s.cache, name, lambda seq, name=name, call=call: asked.append(name) or call(seq))
    a = make_request("a", prompt=5, output=9)
    s.add(a)
    s.admit_next()
    s._preempt(a)
    assert asked[:1] == ["preempt"], (
        "the cache is told by `preempt` who gives way, and by `release` who has ended: of the first, Part 12 "
        "may keep a copy"
    )


def test_one_who_came_earlier_stays_before_a_preempted_request():
    s = scheduler()
    first, second = make_request("first", prompt=5, output=9), make_request("second", prompt=5, output=9)
    s.add(first)
    s.add(second)
    s.admit_next()
    s.admit_next()
    s._preempt(first)
    s._preempt(second)
    assert [request.id for request in s.waiting] == ["first", "second"], (
        "who is preempted goes back to its old place: before those who came later, behind those before it"
    )


def test_preempting_is_counted_and_told():
    told = Told()
    s = scheduler(listeners=Listeners([told]))
    a = make_request("a", prompt=5, output=9)
    s.add(a)
    s.admit_next()
    s._preempt(a)
    assert a.num_preemptions == 1
    assert told.names == ["a"]
