"""Steps ahead and steps with drafts by turns: when what happens, and what goes wrong."""

from dataclasses import replace

import pytest

from engine.speculation.lengths import DraftLengths
from tests.part06.fakes import BlockCache, assert_idle, told_alone
from tests.part13.aheads import GREEDY, assert_told, forward_of, log_of, mixed, run_to_end, steps_of
from tests.part13.test_ahead import LosingRunner
from tests.part16.machines import Machine
from tests.part16.mixed_steps import DRAFTS, POLICIES, Policy, kinds_of, mixing, speculation_of

# 1. When what happens.


def engine_with(answer, **options):
    return mixing(BlockCache(60, 8), Policy(answer), **options)


def test_while_nothing_is_proposed_steps_run_ahead():
    engine = engine_with(lambda step: False)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=4))
    assert engine.step() == [], "nothing has landed yet"
    run_to_end(engine)
    assert log == ["launch", "launch", "land", "launch", "land", "launch", "land", "land"]


def test_nothing_is_launched_on_top_of_a_step_that_has_drafts_or_that_proposes():
    engine = engine_with(lambda step: True)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=20))
    run_to_end(engine)
    assert log == ["launch", "land"] * (len(log) // 2)
    assert speculation_of(engine).tally.accepted > 0


def test_each_step_is_the_one_or_the_other():
    """Proposed behind the third step, and behind the one after the next but one."""
    engine = engine_with(lambda step: step in (3, 6))
    log, kinds = log_of(engine), kinds_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=14))
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("hello", replace(GREEDY, max_tokens=14)).token_ids
    assert kinds[:7] == ["alone", "ahead", "ahead", "drafts", "alone", "ahead", "drafts"]
    assert log[:8] == ["launch", "launch", "land", "launch", "land", "land", "launch", "land"]


def test_drafts_for_which_a_step_has_no_room_are_gone_before_the_next_is_launched():
    """Two requests, and a budget of two tokens: what was proposed is in no step."""
    engine = engine_with(lambda step: step % 2 == 0, seats=2, budget=2)
    for name in "ab":
        engine.add_request(name, "hello", replace(GREEDY, max_tokens=12))
    for output in run_to_end(engine).values():
        assert_told(output, "hello", replace(GREEDY, max_tokens=12))
    assert_idle(engine)


def test_behind_the_last_token_but_one_steps_run_ahead():
    """It is known before the step lands that nothing may be proposed there."""
    engine = engine_with(lambda step: True)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=2))
    run_to_end(engine)
    assert log == ["launch", "launch", "land", "land"]


def test_whoever_has_penalties_waits_for_the_last_token():
    engine = engine_with(lambda step: False)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=4, presence_penalty=0.5))
    run_to_end(engine)
    assert log == ["launch", "land"] * 4


def test_an_end_by_length_wastes_no_step_and_one_by_a_stop_wastes_one():
    for params, wasted in ((GREEDY, 0), (replace(GREEDY, max_tokens=50, stop=("z", "y", "x", "a", "e")), 1)):
        engine = engine_with(lambda step: False)
        engine.add_request("a", "hello", params)
        (output,) = run_to_end(engine).values()
        assert_told(output, "hello", params)
        assert forward_of(engine).fake.steps == len(output.outputs[0].token_ids) + wasted


def test_who_has_left_is_forgotten():
    """However many come and go, no more is remembered than of twice as many as are here."""
    engine = engine_with(lambda step: step % 5 == 0)
    lengths = speculation_of(engine).lengths
    for number in range(40):
        engine.add_request(str(number), "hello", replace(GREEDY, max_tokens=3 + number % 5))
    for _ in steps_of(engine):
        here = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        assert lengths.num_requests <= 2 * (here + 5) + 5, "in a step five may leave, and five begin"
    assert_idle(engine)


def test_room_of_guesses_nobody_made_goes_back_while_the_next_step_is_under_way():
    """Room was lent, nothing was found; then steps run ahead, and the trim comes with one in flight."""
    cache = BlockCache(200, 1)
    engine = mixing(cache, Policy(lambda step: step == 2))
    speculation_of(engine).proposer.propose = lambda inputs: [[] for _ in inputs]
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=12))
    lent = []
    for _ in steps_of(engine):
        lent += [cache.blocks[r.id] - len(r.token_ids) for r in engine.scheduler.running]
    assert max(lent) >= DRAFTS
    assert max(lent[-4:]) <= 1


@pytest.mark.parametrize(("stands", "kind"), [(0.9, "drafts"), (0.3, "ahead")])
def test_lengths_decide_which_it_is(stands, kind):
    """By a table in which a step with drafts takes the host's time on top of the device's."""
    times = Machine(lambda rows: 1 + 0.05 * rows, host=0.6, read=0.0)
    engine = mixing(BlockCache(60, 8), DraftLengths(DRAFTS, times))
    lengths = speculation_of(engine).lengths
    for i in range(400):
        lengths.observe("before", 1, int((i + 1) * stands) - int(i * stands))
    kinds = kinds_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=12))
    run_to_end(engine)
    assert max(set(kinds[1:]), key=kinds.count) == kind


# 2. What goes wrong.

FAILING = frozenset({1, 4, 5, 9, 14, 15, 22})


@pytest.mark.parametrize("when", ["launched", "landed"])
@pytest.mark.parametrize("how", ["lookup", "model"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_that_fails_costs_no_token(name, how, when):
    options = {"how": how, "runner_class": LosingRunner, "recover": lambda step, error: []}
    engine = engine_with(POLICIES[name], **options)
    if when == "launched":
        forward_of(engine).fake.fail_at = {step: RuntimeError("again") for step in FAILING}
    else:
        engine.executor.lose = FAILING
    prompts = {str(i): "the same beginning " + "abc"[i % 3] * 9 for i in range(9)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, mixed(int(request_id)))
    done = run_to_end(engine)
    for request_id, prompt in prompts.items():
        assert_told(done[request_id], prompt, mixed(int(request_id)))
    assert_idle(engine)


def test_a_proposer_that_fails_costs_no_token():
    engine = engine_with(lambda step: step % 3 == 0, recover=lambda step, error: [])
    proposer, calls = speculation_of(engine).proposer, []
    propose = proposer.propose

    def failing(inputs):
        calls.append(len(inputs))
        if len(calls) % 2:
            raise RuntimeError("no room")
        return propose(inputs)

    proposer.propose = failing
    for number in range(6):
        engine.add_request(str(number), "hello", mixed(number))
    done = run_to_end(engine)
    assert len(calls) > 2
    for number in range(6):
        assert_told(done[str(number)], "hello", mixed(number))
    assert_idle(engine)
