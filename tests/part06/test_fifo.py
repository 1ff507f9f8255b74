"""The plainest queue, alone: who runs in which step."""

import pytest

from engine.requests.request import State
from engine.scheduling.fifo import FIFOScheduler
from tests.part06.fakes import BlockCache
from tests.part06.steps import chosen, make_request, play, scheduled


@pytest.fixture
def fifo():
    return FIFOScheduler(BlockCache(num_blocks=20, block_tokens=4))


def confirm(request, fifo, step, drafts=None):
    """The step went well: the request has its token, and the scheduler knows."""
    request.confirm(7, 0.0)
    fifo.update(step, drafts)


def test_nothing_to_do_is_no_batch(fifo):
    assert fifo.schedule() is None, "nobody waits and nobody runs: schedule() is None"


def test_the_first_step_takes_the_whole_prompt(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    assert scheduled(fifo) == {"a": 5}, "nothing of its 5 tokens is computed, so 5 go into the step"
    assert (request.state, request.num_computed_tokens) == (State.RUNNING, 5), (
        "the request is admitted and runs; what the batch takes counts as computed from here on"
    )


def test_each_later_step_takes_the_one_token_that_is_new(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    steps = [chosen(play(fifo)) for _ in range(3)]
    assert steps == [{"a": 5}, {"a": 1}, {"a": 1}], "a step takes what is known and not computed: 5, 1, 1"
    assert request.state is State.FINISHED
    assert fifo.schedule() is None, "the only request has finished"


def test_drafts_are_tokens_to_compute_too(fifo):
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    play(fifo)
    request.draft_ids = [91, 92, 93]
    assert scheduled(fifo) == {"a": 4}, "a step takes num_tokens_to_compute: the new token and 3 drafts"


@pytest.mark.parametrize("drafts", [0, 3], ids=["", "with drafts"])
def test_room_is_reserved_for_every_token_before_it_is_computed(fifo, drafts):
    request = make_request("a", prompt=4, output=9)
    fifo.add(request)
    for _ in range(9):
        step = fifo.schedule()
        room, after = fifo.cache.blocks["a"] * 4, step.batch.context_lens[0]
        assert room >= after, (
            f"cache.reserve must be asked for all {after} tokens that the step ends with, drafts included, "
            f"and gave room for {room}"
        )
        confirm(request, fifo, step, [[9] * drafts])


def test_a_cache_that_says_no_in_mid_story_means_no_step(fifo, monkeypatch):
    fifo.add(make_request("a", prompt=5, output=9))
    play(fifo)
    (request,) = fifo.running
    monkeypatch.setattr(fifo.cache, "reserve", lambda seq, num_tokens: False)
    try:
        step = fifo.schedule()
    except Exception as error:
        pytest.fail(f"the cache said no: that is no error, there is no step; schedule() raised {error!r}")
    assert step is None, f"the cache said no, so no token may be taken, yet the step has {chosen(step.batch)}"
    assert request.num_computed_tokens == 5, "a step that is not taken counts nothing as computed"


def test_a_newcomer_for_whose_prompt_there_is_no_room_computes_nothing_until_there_is(fifo, monkeypatch):
    """Whether it waits in the queue meanwhile or inside is the same to everybody."""
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(fifo.cache, "reserve", lambda seq, num_tokens: False)
        assert fifo.schedule() is None, "the cache has no room for the prompt, so there is no step"
    assert (request.num_computed_tokens, len(request.token_ids)) == (0, 5), (
        "without a step, neither of the two numbers has changed"
    )
    assert scheduled(fifo) == {"a": 5}, "it runs as soon as there is room"


def test_a_request_with_nothing_to_compute_waits_for_its_token(fifo):
    request = make_request("a", prompt=4, output=9)
    fifo.add(request)
    fifo.schedule()  # the step is under way, and its token is not here yet
    assert fifo.schedule() is None, "known = computed: there is no step to take until the token arrives"
    assert fifo.running == [request], "it goes on running"


def test_the_oldest_runs_to_its_end_before_the_next_begins(fifo):
    for name in "abc":
        fifo.add(make_request(name, prompt=2, output=2))
    order = [list(chosen(play(fifo))) for _ in range(6)]
    assert order == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]], (
        "one request at a time, the oldest to its end before the next is admitted"
    )


def test_nobody_is_admitted_while_one_runs(fifo):
    for name in "ab":
        fifo.add(make_request(name, prompt=2, output=5))
    play(fifo), play(fifo)
    running = [request.id for request in fifo.running]
    assert running == ["a"], "one at a time: admit_next() is for a step that finds nobody running"


def test_priority_means_nothing_to_it(fifo):
    fifo.add(make_request("a", prompt=1, output=1, priority=9))
    fifo.add(make_request("b", prompt=1, output=1, priority=-9))
    assert [list(chosen(play(fifo))) for _ in range(2)] == [["a"], ["b"]], "first in, first out, nothing else"


def test_a_full_cache_makes_the_queue_wait(fifo):
    stranger = make_request("stranger", prompt=80, output=1)
    fifo.cache.admit(stranger)
    assert fifo.cache.reserve(stranger, 80)
    request = make_request("a", prompt=2, output=1)
    fifo.add(request)
    assert fifo.schedule() is None, "admit_next() found no room in the cache: there is nobody to run"
    assert request.state is State.WAITING
    fifo.cache.release(stranger)
    assert chosen(play(fifo)) == {"a": 2}


def test_nobody_overtakes_one_for_whom_there_is_no_room_yet(fifo, monkeypatch):
    admit = fifo.cache.admit
    monkeypatch.setattr(fifo.cache, "admit", lambda seq: None if seq.id == "big" else admit(seq))
    for name in ("big", "small"):
        fifo.add(make_request(name, prompt=5, output=1))
    assert fifo.schedule() is None, (
        "first in, first out: while the cache has no room for the first in the queue, nobody behind it is "
        "admitted"
    )
    assert [request.id for request in fifo.waiting] == ["big", "small"], "and each keeps its place"


def test_tokens_count_as_computed_until_the_step_is_taken_back(fifo):
    request = make_request("a", prompt=5, output=3)
    fifo.add(request)
    step = fifo.schedule()
    fifo.rollback(step)
    assert (request.state, request.num_computed_tokens) == (State.RUNNING, 0)
    assert chosen(play(fifo)) == {"a": 5}
    step = fifo.schedule()
    request.add_placeholder()
    fifo.rollback(step)
    assert request.num_computed_tokens == 5
    assert (request.num_output_placeholders, request.token_ids) == (0, [*range(5), 7]), (
        "what the step would have brought is not expected any more: its placeholder goes"
    )
    assert chosen(play(fifo)) == {"a": 1}


@pytest.mark.parametrize(("drafts", "new"), [([[94]], [94]), (None, [])], ids=["new drafts", "no drafts"])
def test_rejected_drafts_were_never_computed(fifo, drafts, new):
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    play(fifo)
    request.draft_ids = [91, 92, 93]
    confirm(request, fifo, fifo.schedule(), drafts)
    assert request.num_computed_tokens == 6, "rejected drafts were never computed"
    assert (request.draft_ids, request.num_tokens_to_compute) == (new, 1 + len(new))


def test_no_more_is_committed_than_is_computed_and_confirmed(fifo, monkeypatch):
    """Three drafts are rejected, and one token more is on its way (Part 13)."""
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    play(fifo)
    request.draft_ids = [91, 92, 93]
    step = fifo.schedule()
    request.confirm(7, 0.0)
    request.add_placeholder()
    committed = []
    monkeypatch.setattr(fifo.cache, "commit", lambda seq, num_tokens: committed.append(num_tokens))
    fifo.update(step)
    assert committed == [6], "7 tokens are confirmed; the last of them comes from this step's logits"


def test_a_step_that_succeeds_does_not_concern_who_has_left_meanwhile(fifo, monkeypatch):
    request = make_request("a", prompt=5, output=9)
    fifo.add(request)
    step = fifo.schedule()
    fifo.finish(request)
    committed = []
    monkeypatch.setattr(fifo.cache, "commit", lambda seq, num_tokens: committed.append(seq.id))
    fifo.update(step, drafts=[[94]])
    assert committed == [], "its memory was given back: nothing of it can be committed"
    assert request.draft_ids == [], "it has no next step to propose for"


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


def test_no_step_is_foreseen_behind_the_last_token_that_an_output_may_have():
    """One token is there and up to 4 may come: two more placeholders have a step behind them (Part 13)."""
    request = make_request("a", prompt=5, output=4)
    request.confirm(7, 0.0)
    for expected in (1, 2, 2):
        request.add_placeholder()
        assert request.num_output_placeholders == expected, (
            "tokens on their way count with those that are there: the last of all gets no placeholder"
        )


class Slots:
    """One slot for adapters (Part 18), which running requests keep in use."""

    def __init__(self):
        self.slot_of = {"here": 0}

    def assign(self, key, running):
        return key in self.slot_of


@pytest.mark.parametrize(
    ("adapter", "rank", "admitted"),
    [("here", 0.0, "b"), ("here", 0.999, "b"), ("here", 1.0, None), ("here", 1.5, None),
     ("away", 0.0, None), ("other", 0.0, None), (None, 0.0, "b"), (None, 7.0, "b")],
)  # fmt: skip
def test_who_waits_for_a_slot_is_overtaken_for_a_while_only_by_those_who_keep_the_slot(
    adapter, rank, admitted
):
    fifo = FIFOScheduler(BlockCache(num_blocks=20, block_tokens=4), adapter_slots=Slots())
    for name, key, place in (("a", "away", 0.0), ("b", adapter, rank)):
        request = make_request(name, prompt=2, output=2)
        request.adapter, request.rank = key, (place, ord(name))
        fifo._enqueue(request)
    request = fifo.admit_next()
    assert (request and request.id) == admitted, (
        f"a waits for a slot; b, whose rank is {rank:g} behind and adapter {adapter}, may "
        f"{'' if admitted else 'not '}go first"
    )
    assert [request.id for request in fifo.running] == ([admitted] if admitted else [])


def test_who_has_a_slot_goes_first_if_it_is_first():
    fifo = FIFOScheduler(BlockCache(num_blocks=20, block_tokens=4), adapter_slots=Slots())
    for name in "ab":
        request = make_request(name, prompt=2, output=2)
        request.adapter = "here"
        fifo.add(request)
    assert fifo.admit_next().id == "a", "its adapter has a slot: nobody overtakes it"
