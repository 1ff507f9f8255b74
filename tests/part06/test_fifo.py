"""The plainest queue, alone: who runs in which step."""

import pytest

from engine.scheduling.fifo import FIFOScheduler
from engine.scheduling.request import State
from tests.part06.fakes import BlockCache
from tests.part06.steps import chosen, make_request, play


@pytest.fixture
def fifo():
    return FIFOScheduler(BlockCache(num_blocks=20, block_tokens=4))


def test_nothing_to_do_is_no_batch(fifo):
    assert fifo.schedule() is None


def test_the_whole_prompt_goes_first_then_a_token_a_step(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    assert [chosen(play(fifo)) for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert request.state is State.FINISHED
    assert fifo.schedule() is None


def test_the_oldest_runs_to_its_end_before_the_next_begins(fifo):
    for name in "abc":
        fifo.add(make_request(name, prompt=2, output=2))
    assert [list(chosen(play(fifo))) for _ in range(6)] == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]]


def test_priority_means_nothing_to_it(fifo):
    fifo.add(make_request("a", prompt=1, output=1, priority=9))
    fifo.add(make_request("b", prompt=1, output=1, priority=-9))
    assert [list(chosen(play(fifo))) for _ in range(2)] == [["a"], ["b"]]


def test_room_is_reserved_for_every_token_before_it_is_computed(fifo):
    fifo.add(make_request("a", prompt=4, output=9))
    for step in range(9):
        batch = fifo.schedule()
        assert fifo.cache.blocks["a"] * 4 >= batch.context_lens[0] == 4 + step
        batch.requests[0].confirm(7, 0.0)
        fifo.update(batch)


def test_tokens_count_as_computed_until_the_step_is_taken_back(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    batch = fifo.schedule()
    assert (request.state, request.num_computed_tokens) == (State.RUNNING, 5)
    fifo.rollback(batch)
    assert (request.state, request.num_computed_tokens) == (State.RUNNING, 0)
    assert chosen(play(fifo)) == {"a": 5}
    batch = fifo.schedule()
    fifo.rollback(batch)
    assert request.num_computed_tokens == 5
    assert chosen(play(fifo)) == {"a": 1}


def test_after_an_update_the_last_token_is_the_one_still_to_compute(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    for _ in range(2):
        play(fifo)
        assert request.num_tokens_to_compute == 1


def test_rejected_drafts_were_never_computed(fifo):
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    play(fifo)
    request.draft_ids = [91, 92, 93]
    batch = fifo.schedule()
    assert chosen(batch) == {"a": 4}
    request.confirm(7, 0.0)
    fifo.update(batch, drafts=[[94]])
    assert (request.num_computed_tokens, request.draft_ids, request.num_tokens_to_compute) == (6, [94], 2)


@pytest.mark.parametrize("finished", ["a", "b"])
def test_finishing_one_who_runs_or_waits_lets_the_others_be(fifo, finished):
    requests = {name: make_request(name, prompt=2, output=2) for name in "abc"}
    for request in requests.values():
        fifo.add(request)
    play(fifo)
    fifo.finish(requests[finished])
    fifo.finish(requests[finished])
    assert requests[finished].state is State.FINISHED
    rest = []
    while batch := play(fifo):
        rest += chosen(batch)
    assert rest == {"a": ["b", "b", "c", "c"], "b": ["a", "c", "c"]}[finished]
    assert (fifo.running, fifo.waiting, fifo.cache.usage().num_sequences) == ([], [], 0)


def test_a_full_cache_makes_the_queue_wait(fifo):
    stranger = make_request("stranger", prompt=80, output=1)
    fifo.cache.begin(stranger)
    assert fifo.cache.reserve(stranger, 80)
    request = make_request("a", prompt=2, output=1)
    fifo.add(request)
    assert fifo.schedule() is None
    assert request.state is State.WAITING
    fifo.cache.release(stranger)
    assert chosen(play(fifo)) == {"a": 2}
