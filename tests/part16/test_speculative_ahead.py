"""Steps ahead and steps with drafts by turns: when what happens, and what `Lengths` is told."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.speculation.ahead import AheadSpeculativeExecutor, RememberingExecutor
from engine.speculation.verify import has_drafts
from tests.part06.fakes import assert_idle, told_alone
from tests.part13.aheads import GREEDY, assert_told, log_of, mixed, run_to_end, steps_of
from tests.part13.test_ahead import LosingExecutor
from tests.part16.mixed_steps import DRAFTS, POLICIES, Blocks, Policy, kinds_of, mixing
from tests.part16.test_speculative_executor import request

# 1. When what happens.


def engine_with(answer, **options):
    """An engine, and its policy."""
    policy = Policy(answer)
    return mixing(Blocks(60, 8), policy, **options), policy


def test_while_nothing_is_proposed_steps_run_ahead():
    engine, _ = engine_with(lambda step: False)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=4))
    assert engine.step() == [], "nothing has landed yet"
    run_to_end(engine)
    assert log == ["launch", "launch", "land", "launch", "land", "launch", "land", "land"]


def test_nothing_is_launched_on_top_of_a_step_that_has_drafts_or_that_proposes():
    engine, _ = engine_with(lambda step: True)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=20))
    run_to_end(engine)
    assert log == ["launch", "land"] * (len(log) // 2)
    assert engine.executor.tally.accepted > 0


def test_each_step_is_the_one_or_the_other():
    """Proposed behind the third step, and behind the one after the next but one."""
    engine, policy = engine_with(lambda step: step in (3, 6))
    log, kinds = log_of(engine), kinds_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=14))
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].token_ids == told_alone("hello", replace(GREEDY, max_tokens=14)).token_ids
    assert kinds[:7] == ["alone", "ahead", "ahead", "drafts", "alone", "ahead", "drafts"]
    assert log[:8] == ["launch", "launch", "land", "launch", "land", "land", "launch", "land"]
    assert len(policy.asked) == log.count("land"), "once for each step"


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_asked_once_for_each_step(name):
    engine, policy = engine_with(POLICIES[name])
    log = log_of(engine)
    for number in range(6):
        engine.add_request(str(number), "hello", mixed(number))
    for output in run_to_end(engine).values():
        assert not output.error, output.error
    assert len(policy.asked) == log.count("land")


def test_where_none_are_wanted_after_all_steps_run_ahead():
    """`choose` knows before the step lands that its tokens are the last but one."""
    engine, policy = engine_with(lambda step: True)
    log = log_of(engine)
    policy.choose = lambda names, caps: [0] * len(caps)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=4))
    run_to_end(engine)
    assert log == ["launch", "launch", "land", "launch", "land", "launch", "land", "land"]


def test_whoever_has_penalties_waits_for_the_last_token():
    engine, _ = engine_with(lambda step: False)
    log = log_of(engine)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=4, presence_penalty=0.5))
    run_to_end(engine)
    assert log == ["launch", "land"] * 4


def test_an_end_by_length_wastes_no_step_and_one_by_a_stop_wastes_one():
    for params, wasted in ((GREEDY, 0), (replace(GREEDY, max_tokens=50, stop=("z", "y", "x", "a", "e")), 1)):
        engine, _ = engine_with(lambda step: False)
        engine.add_request("a", "hello", params)
        (output,) = run_to_end(engine).values()
        assert_told(output, "hello", params)
        assert engine.executor.inner.forward.fake.steps == len(output.outputs[0].token_ids) + wasted


def test_who_has_finished_is_forgotten_though_a_step_of_its_was_under_way():
    engine, policy = engine_with(lambda step: step % 5 == 0)
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=50, stop=("z", "y", "x", "a", "e")))
    engine.add_request("b", "there", replace(GREEDY, max_tokens=50))
    seen = set()
    for outputs in steps_of(engine):
        seen |= set(policy._accepted)
        if any(output.request_id == "a" and output.finished for output in outputs):
            assert engine.abort_request("b")
            assert engine.has_unfinished_requests(), "a step was launched for them, and has not landed"
    assert seen == {"a/0", "b/0"}
    assert policy._accepted == {}, "the step that lands for nobody brings nobody back"
    assert_idle(engine)


def test_room_of_guesses_nobody_made_goes_back_while_the_next_step_is_under_way():
    """Room was lent, nothing was found; then steps run ahead, and the trim comes with one in flight."""
    cache = Blocks(200, 1)
    engine = mixing(cache, Policy(lambda step: step == 2))
    engine.executor.proposer.propose = lambda texts, most: [[] for _ in texts]
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=12))
    lent = []
    for _ in steps_of(engine):
        lent += [cache.blocks[one.id] - len(one.token_ids) for one in engine.scheduler.running]
    assert max(lent) >= DRAFTS
    assert max(lent[-4:]) <= 1


# 2. What goes wrong.

FAILING = frozenset({1, 4, 5, 9, 14, 15, 22})


class Losing(LosingExecutor, RememberingExecutor):
    pass


@pytest.mark.parametrize("when", ["launched", "landed"])
@pytest.mark.parametrize("how", ["lookup", "model"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_that_fails_costs_no_token(name, how, when):
    options = {"how": how, "inner": Losing, "recover": lambda batch, error: []}
    engine, _ = engine_with(POLICIES[name], **options)
    if when == "launched":
        engine.executor.inner.forward.fake.fail_at = {step: RuntimeError("again") for step in FAILING}
    else:
        engine.executor.inner.lose = FAILING
    prompts = {str(i): "the same beginning " + "abc"[i % 3] * 9 for i in range(9)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, mixed(int(request_id)))
    done = run_to_end(engine)
    for request_id, prompt in prompts.items():
        assert_told(done[request_id], prompt, mixed(int(request_id)))
    assert_idle(engine)


def test_a_proposer_that_fails_costs_no_token():
    engine, _ = engine_with(lambda step: step % 3 == 0, recover=lambda batch, error: [])
    propose, calls = engine.executor.proposer.propose, []

    def failing(texts, most):
        calls.append(len(texts))
        if len(calls) % 2:
            raise RuntimeError("no room")
        return propose(texts, most)

    engine.executor.proposer.propose = failing
    for number in range(6):
        engine.add_request(str(number), "hello", mixed(number))
    done = run_to_end(engine)
    assert len(calls) > 2
    for number in range(6):
        assert_told(done[str(number)], "hello", mixed(number))
    assert_idle(engine)


# 3. What `Lengths` is told.


class Clocked:
    """A device with a queue, a host that works beside it, and a clock; requests have a token in each step."""

    max_positions = 10**9

    def __init__(self, device=5.0, launch=1.0, verify=6.0, propose=0.25) -> None:
        self.now = self.free = 0.0  # free: when the device has done all that it was given
        self.costs = device, launch, verify, propose
        self.policy = Policy(lambda step: False)
        self.executor = AheadSpeculativeExecutor(self, self, self, self.policy, lambda: self.now)

    def reserve(self, request, total):
        return True

    def trim(self, request, total):
        pass

    def unread(self, request, ids):
        return 0

    def propose(self, texts, most):
        self.now += self.costs[3]
        return [[7] * k for k in most]

    def submit(self, batch):
        device, launch, verify, _ = self.costs
        self.now += launch
        self.free = done = max(self.now, self.free) + (verify if has_drafts(batch) else device)

        def result():
            self.now = max(self.now, done)
            return SimpleNamespace(tokens=[[7] * len(rows) for rows in batch.logit_rows])

        return SimpleNamespace(batch=batch, result=result)


def test_a_plain_step_costs_the_time_from_one_landing_to_the_next():
    from engine.batch import make_batch
    from engine.executor import StepResult

    device = Clocked()

    def submit():
        pending = device.executor.submit(make_batch([(request(), 1), (request("b"), 1)]))
        inner = pending.pending.result
        pending.pending.result = lambda: StepResult(inner().tokens)
        return pending

    def land(pending):
        assert not pending.proposes()
        pending.result()

    first = submit()
    for _ in range(5):
        second = submit()
        land(first)
        first = second
        device.now += 2.0  # what the host does between two steps, beside the device
    land(first)
    people, rows, seconds, on_top = zip(*device.policy.told, strict=True)
    assert set(people) == set(rows) == {2}
    assert seconds == (6.0, 5.0, 5.0, 5.0, 5.0, 5.0), "the first is alone: it waits for the host as well"
    assert on_top == (False, *[True] * 5)
