"""`AheadEngine.step`, on a device that writes down what it is given, and when its tokens are read.

The fake model and the cache are Part 6's. Tokens are chosen when a step is launched, as on a GPU's queue.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN
from engine.execution.runner import ModelRunner
from engine.requests.batch import PLACEHOLDER, Batch
from engine.requests.step import Pending, Step, StepResult
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, assert_idle, told_alone

MOST_STEPS = 200


def greedy(tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


class Noted:
    """A step under way whose reading is written down."""

    def __init__(self, pending: Pending, number: int, log: list[str], error: Exception | None) -> None:
        self.pending, self.number, self.log, self.error = pending, number, log, error

    def result(self) -> StepResult:
        if f"read {self.number}" not in self.log:
            self.log.append(f"read {self.number}")
        if self.error:
            raise self.error
        return self.pending.result()


class Device:
    """An executor that knows the token it chose for each request last: a placeholder stands for it."""

    def __init__(self, forward: FakeForward) -> None:
        self.forward, self.runner = forward, ModelRunner([forward])
        self.log: list[str] = []
        self.batches: list[Batch] = []
        self.last: dict[str, int] = {}
        self.fails: dict[int, Exception] = {}  # step -> what reading it raises

    def submit(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        number = len(self.batches)
        self.log.append(f"launch {number}")
        token_ids = list(batch.token_ids)
        for name, end in zip(batch.ids, batch.query_start[1:], strict=True):
            if token_ids[end - 1] == PLACEHOLDER:
                token_ids[end - 1] = self.last[name]
        pending = self.runner.submit(replace(batch, token_ids=tuple(token_ids)))
        tokens = zip(batch.ids, pending.result().tokens, strict=True)
        self.last |= {name: chosen[-1] for name, chosen in tokens if chosen}
        return Noted(pending, number, self.log, self.fails.get(number))


def made(kind: type = AheadEngine, seats: int = 4, budget: int = 64, **options) -> LLMEngine:
    cache = BlockCache(60, 8)
    return kind(
        TOKENIZER, CONFIG, ContinuousScheduler(cache, seats, budget), Device(FakeForward(cache)), **options
    )


def run(engine: LLMEngine) -> dict:
    """request id -> its last output."""
    done = {}
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"after {MOST_STEPS} steps the engine still has unfinished requests")


def test_the_first_step_is_launched_and_nothing_lands():
    engine = made()
    engine.add_request("a", "hello", greedy(4))
    assert engine.step() == [], "the first step launches, and there is none before it to land"
    assert engine.executor.log == ["launch 1"], "the first step launches, and does not wait for its tokens"


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_read():
    engine = made()
    engine.add_request("a", "hello", greedy(4))
    engine.step()
    (output,) = engine.step()
    assert engine.executor.log[:3] == ["launch 1", "launch 2", "read 1"], (
        "launch first, then land the last one"
    )
    assert len(output.outputs[0].token_ids) == 1, "the second call tells what the first step found"
    engine.step()
    assert engine.executor.log[3:5] == ["launch 3", "read 2"], "every call lands the step of the call before"


def test_a_placeholder_stands_for_the_token_that_is_still_on_the_device():
    engine = made()
    engine.add_request("a", "hello", greedy(4))
    engine.step(), engine.step()
    second = engine.executor.batches[1]
    assert second.token_ids == (PLACEHOLDER,), "who gets a token from a launched step expects it"
    assert second.positions == (5,), "and goes on behind it"


def test_who_gets_no_token_from_a_step_expects_none():
    engine = made(budget=4)
    engine.add_request("a", "hello, you", greedy(3))  # 10 tokens, in chunks of 4, 4 and 2
    engine.step(), engine.step(), engine.step()
    chunks = [batch.token_ids for batch in engine.executor.batches]
    want = [tuple(b"hell"), tuple(b"o, y"), tuple(b"ou")]
    assert chunks == want, f"a chunk inside a prompt gives no token: {want}, got {chunks}"
    run(engine)


def test_an_end_by_length_wastes_no_step():
    engine = made()
    engine.add_request("a", "hello", greedy(4))
    done = run(engine)
    assert done["a"].outputs[0].token_ids == told_alone("hello", greedy(4)).token_ids
    assert len(engine.executor.batches) == 4, "4 tokens take 4 steps: a known end is foreseen"


def test_the_last_step_lands_although_none_follows():
    engine = made()
    engine.add_request("a", "hello", greedy(1))
    assert engine.step() == []
    (output,) = engine.step()
    assert output.finished, "nobody is left to launch; the step in flight lands all the same"
    assert_idle(engine)


def test_penalties_wait_for_the_token():
    params = greedy(3, presence_penalty=0.5)
    engine = made()
    engine.add_request("a", "hello", params)
    engine.step(), engine.step(), engine.step()
    want = ["launch 1", "read 1", "launch 2"]
    assert engine.executor.log == want, (
        "penalties count the output: the last step lands before one is launched"
    )
    assert PLACEHOLDER not in engine.executor.batches[1].token_ids
    assert run(engine)["a"].outputs[0].token_ids == told_alone("hello", params).token_ids


class Waiting:
    """A capability that needs the tokens of some steps before the next is launched."""

    def __init__(self) -> None:
        self.needs: set[int] = set()  # steps
        self.overlapped: list[bool] = []  # of each step that landed

    def before_submit(self, step: Step) -> Batch:
        return step.batch

    def must_land_first(self, step: Step) -> bool:
        return len(self.overlapped) + 1 in self.needs

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        self.overlapped.append(step.overlapped)
        return result


def test_a_step_that_a_capability_waits_for_lands_before_the_next_is_launched():
    waiting = Waiting()
    waiting.needs = {2}
    engine = made(capabilities=[waiting])
    engine.add_request("a", "hello", greedy(4))
    done = run(engine)
    want = ["launch 1", "launch 2", "read 1", "read 2", "launch 3", "launch 4", "read 3", "read 4"]
    assert engine.executor.log == want, "`_must_land_first` of step 2: it lands, and none is launched then"
    assert done["a"].outputs[0].token_ids == told_alone("hello", greedy(4)).token_ids


def test_a_capability_learns_which_steps_were_overlapped():
    waiting = Waiting()
    waiting.needs = {2}
    engine = made(capabilities=[waiting])
    engine.add_request("a", "hello", greedy(4))
    run(engine)
    assert waiting.overlapped[:3] == [True, False, True], (
        "a step on top of which another is scheduled is `overlapped`; step 2, which landed first, is not"
    )


def test_who_has_finished_meanwhile_expects_nothing():
    engine = made()
    for name in "ab":
        engine.add_request(name, "hello", greedy(9))
    engine.step(), engine.step()
    gone = engine.scheduler.running[0]
    engine.abort_request("a")
    engine.step()
    assert PLACEHOLDER not in gone.token_ids, "who has finished gets no token any more, and expects none"
    assert run(engine)["b"].outputs[0].token_ids == told_alone("hello", greedy(9)).token_ids
    assert_idle(engine)


def test_who_fails_while_its_next_step_is_under_way_expects_nothing():
    engine = made()
    engine.add_request("a", "hello", greedy(9))
    broken = SimpleNamespace(result=lambda: StepResult([[NO_TOKEN]]))
    engine.executor = SimpleNamespace(submit=lambda batch: broken)
    engine.step()
    (gone,) = engine.scheduler.running
    (output,) = engine.step()
    assert "not finite" in output.error
    assert PLACEHOLDER not in gone.token_ids


def test_what_was_launched_on_top_of_a_failed_step_is_taken_back():
    engine = made(recover=lambda step, error: [])  # nobody fails: the step is done again
    engine.executor.fails = {2: RuntimeError("no"), 5: RuntimeError("no")}
    engine.add_request("a", "hello", greedy(6))
    done = run(engine)
    rule = "step 2 failed: step 3, on top of it, is rolled back and never lands"
    assert "read 3" not in engine.executor.log, rule
    assert done["a"].outputs[0].token_ids == told_alone("hello", greedy(6)).token_ids, rule
    assert_idle(engine)


def test_nothing_is_launched_on_top_of_a_step_that_failed_at_its_launch():
    engine = made(recover=lambda step, error: [])
    engine.executor.forward.fail_at = {1: RuntimeError("no"), 4: RuntimeError("no")}
    engine.add_request("a", "hello", greedy(6))
    engine.step()
    (request,) = engine.scheduler.running
    engine.step()
    assert engine.executor.log == ["launch 1"], (
        "a step that failed at its launch lands first: whoever was in it has nothing to go on from"
    )
    assert PLACEHOLDER not in request.token_ids, "a launch that failed will give nobody a token"
    assert run(engine)["a"].outputs[0].token_ids == told_alone("hello", greedy(6)).token_ids
    assert_idle(engine)


def test_when_nobody_can_run_the_engine_says_so():
    engine = made()
    engine.add_request("a", "hello", greedy(4))
    engine.scheduler.cache.admit = lambda seq: None
    assert engine.step() == [], "nobody is in flight, nobody can run: it may change"
    errors = [output.error for output in engine.step()]
    assert len(errors) == 1, "nobody in flight, nobody can run, for the second time: `_stuck` ends the first"
    assert "the cache has no room" in errors[0]


@pytest.mark.parametrize("seats", [1, 3])
def test_many_requests_get_what_they_get_one_step_at_a_time(seats):
    prompts = {str(i): "abcdefgh"[i] * (3 + 7 * i) for i in range(8)}
    params = {
        name: SamplingParams(temperature=0.9 * (int(name) % 2), seed=int(name), max_tokens=3 + 2 * int(name))
        for name in prompts
    }
    engine = made(seats=seats, budget=24)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name])
    done = run(engine)
    for name, prompt in prompts.items():
        want = told_alone(prompt, params[name]).token_ids
        assert done[name].outputs[0].token_ids == want, f"request {name} got other tokens than alone"
    assert_idle(engine)
