"""No request starves: under endless newcomers, better ones too, each is served within a bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.request import State
from engine.scheduling import continuous
from engine.scheduling.continuous import STEPS_PER_PRIORITY, ContinuousScheduler
from tests.part06.fakes import BlockCache
from tests.part06.steps import make_request, play

PATIENCE = 16  # in place of STEPS_PER_PRIORITY, so that the wait is short enough to play through

newcomer = st.tuples(st.integers(1, 12), st.integers(1, 4))  # prompt, output
crowds = st.fixed_dictionaries(
    {
        "seats": st.integers(1, 4),
        "budget": st.integers(4, 24),
        "blocks": st.integers(8, 40),  # of 4 tokens: from hardly more than one request to plenty
        "per_step": st.integers(1, 2),
        "kinds": st.lists(newcomer, min_size=1, max_size=5),
        "better": st.integers(0, 3),  # levels of priority by which all newcomers are better
        "victim": st.tuples(st.integers(1, 20), st.integers(1, 8)),
        "before": st.integers(0, 10),
    }
)


def serve_under_a_stream(crowd, patience: int) -> tuple[int, set[int]]:
    """Steps until the victim was done, and the steps of arrival of those who ran while it was waiting."""
    scheduler = ContinuousScheduler(BlockCache(crowd["blocks"], 4), crowd["seats"], crowd["budget"])
    number = 0

    def arrive(step):
        nonlocal number
        prompt, output = crowd["kinds"][number % len(crowd["kinds"])]
        number += 1
        scheduler.add(make_request(f"{step}:{number}", prompt, output, priority=-crowd["better"]))

    for _ in range(crowd["before"]):
        arrive(0)
    play(scheduler)
    victim = make_request("victim", *crowd["victim"])
    scheduler.add(victim)
    window = crowd["better"] * patience
    work = sum(crowd["victim"]) + 16 * (crowd["before"] + crowd["per_step"] * (window + 1) + crowd["seats"])
    overtakers, step = set(), 0
    while victim.state is not State.FINISHED:
        step += 1
        assert step <= 4 * work, f"the victim starves: {crowd}"
        for _ in range(crowd["per_step"]):
            arrive(step)
        batch = play(scheduler)
        if victim.state is State.WAITING:
            overtakers |= {int(name.split(":")[0]) for name in batch.ids}
    return step, overtakers


@given(crowds)
@settings(max_examples=150)
def test_a_request_is_served_however_many_better_ones_keep_coming(crowd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous, "STEPS_PER_PRIORITY", PATIENCE)
        _, overtakers = serve_under_a_stream(crowd, PATIENCE)
    assert max(overtakers, default=0) <= crowd["better"] * PATIENCE, (
        "overtaken by one who came too late for it"
    )


@given(crowds.map(lambda crowd: crowd | {"better": 0}))
def test_nobody_who_comes_later_with_the_same_priority_is_admitted_before(crowd):
    _, overtakers = serve_under_a_stream(crowd, STEPS_PER_PRIORITY)
    assert max(overtakers, default=0) == 0


def test_with_the_true_patience_a_request_one_level_worse_waits_that_many_steps_and_no_more():
    crowd = {"seats": 1, "budget": 8, "blocks": 40, "per_step": 1, "kinds": [(1, 1)], "better": 1}
    crowd |= {"victim": (1, 1), "before": 0}
    steps, overtakers = serve_under_a_stream(crowd, STEPS_PER_PRIORITY)
    assert max(overtakers) == STEPS_PER_PRIORITY
    assert steps == STEPS_PER_PRIORITY + 1


def test_a_running_request_makes_progress_in_every_step_when_memory_is_there():
    scheduler = ContinuousScheduler(BlockCache(1000, 4), 4, 4)
    old = make_request("old", 3, 40)
    scheduler.add(old)
    play(scheduler)
    for step in range(30):
        scheduler.add(make_request(f"{step}", 50, 3, priority=0))
        before = len(old.token_ids)
        play(scheduler)
        assert len(old.token_ids) == before + 1
